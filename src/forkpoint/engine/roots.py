"""Roots of a microbatch's one backward."""

import torch
from torch import Tensor

Root = tuple[Tensor, Tensor]
"""A tensor and the gradient there."""


def roots_of(
    value: Tensor | None, others: tuple[Tensor, ...], scale: float, more: Root | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors and their gradients: the microbatch's loss with `scale`, or the host's roots with
    zeros, and then `more`.

    The host's roots reach what `more` may not, such as blocks without a router.
    """
    if value is not None and value.requires_grad:
        tensors, gradients = [value], [torch.full_like(value, scale)]
    else:
        tensors = [x for x in others if x.requires_grad]
        gradients = [torch.zeros_like(x) for x in tensors]
    if more is not None:
        tensors.append(more[0])
        gradients.append(more[1])
    return tensors, gradients
