"""Calls of a loss: the values that it is computed from, and checks of what it returns."""

import torch
from torch import Tensor

from forkpoint.config import Config
from forkpoint.errors import ConfigError
from forkpoint.losses.base import Loss, LossBatch, LossOutputs
from forkpoint.losses.missing import computed


def names_of(head: str, config: Config, entropy: bool) -> tuple[str, ...]:
    """Names of a step's values per token; `head`: of those that a loss is computed from.

    Raises ConfigError where a critic is asked for numbers of a distribution.
    """
    others = config.head_statistics
    if others and head == "values":
        raise ConfigError(
            f"head_statistics is {others!r}, and the model is a critic, whose head gives a "
            "value and no distribution. Leave the option out."
        )
    return (head, *(("entropies",) if entropy else ()), *others)


def called(loss: Loss, outputs: LossOutputs, view: LossBatch, head: str) -> Tensor:
    """The loss of these outputs.

    Args:
        loss: of a step.
        outputs: of the head, for the trained tokens of `view`.
        view: a part of the batch.
        head: the name of the outputs that a loss is computed from.

    Raises ConfigError where it is no scalar, has no graph where the outputs have one, or reads what
    is None.
    """
    value = computed(loss, outputs, view)
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
