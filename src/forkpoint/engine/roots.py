"""Roots of a microbatch's one backward."""

from collections.abc import Mapping

import torch
from torch import Tensor

from forkpoint.engine.host import HeadOutputs

Root = tuple[Tensor, Tensor]
"""A tensor and the gradient there."""


def roots_of(
    gradients: Mapping[str, Tensor], outputs: HeadOutputs, more: Root | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors and their gradients: the head's values with those of the loss, or the host's roots
    with zeros, and then `more`.

    The host's roots reach what `more` may not, such as blocks without a router.
    """
    tensors = [outputs.per_token[name] for name in gradients]
    found = list(gradients.values())
    if not tensors:
        tensors = [x for x in outputs.roots if x.requires_grad]
        found = [torch.zeros_like(x) for x in tensors]
    if more is not None:
        tensors.append(more[0])
        found.append(more[1])
    return tensors, found
