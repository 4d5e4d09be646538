"""Calls of a loss, and checks of what it returns."""

import torch
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.losses.base import Loss, LossBatch, LossOutputs


def called(loss: Loss, outputs: LossOutputs, view: LossBatch, head: str) -> Tensor:
    """The loss of these outputs.

    Args:
        loss: of a step.
        outputs: of the head, for the trained tokens of `view`.
        view: a part of the batch.
        head: the name of the outputs that a loss is computed from.

    Raises ConfigError where it is no scalar, or has no graph where the outputs have one.
    """
    value = loss(outputs, view)
    given = outputs.per_token.values()
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
        found = (
            f"{value.dtype} of shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else repr(value)
        )
        raise ConfigError(
            f"the loss {loss!r} returned {found}; it must return a floating-point scalar tensor, "
            f"computed from outputs.{head}."
        )
    if graph and not value.requires_grad:
        raise ConfigError(
            f"the loss {loss!r} returned a scalar without a graph, so that nothing would be "
            "trained; it must be computed from outputs.logprobs, without detach(), item() or "
            "torch.no_grad()."
        )
    return value
