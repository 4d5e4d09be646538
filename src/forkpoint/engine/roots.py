"""Roots of a microbatch's one backward."""

from collections.abc import Mapping

import torch
from torch import Tensor

from forkpoint.engine.host import HeadOutputs

Root = tuple[Tensor, Tensor]
"""A tensor and the gradient there."""


def roots_of(gradients: Mapping[str, Tensor], outputs: HeadOutputs, more: list[Root]) -> list[Root]:
    """The head's values with the gradients of the loss, or the host's roots with zeros, and then
    `more`.

    The host's roots reach what `more` may not, such as blocks without a router.
    """
    found = [(outputs.per_token[name], gradient) for name, gradient in gradients.items()]
    if not found:
        found = [(x, torch.zeros_like(x)) for x in outputs.roots if x.requires_grad]
    return [*found, *more]
