"""Calls of losses, with errors for fields that are None and for tensors that get no gradient."""

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.losses.base import NO_ENTROPIES, SOURCES, Loss, LossBatch, no_field
from forkpoint.losses.outputs import LossOutputs
from forkpoint.rollouts.batch import short

ACCUMULATES = "torch::autograd::AccumulateGrad"
"""Name of the autograd nodes that add to `.grad` of a leaf."""


def _computed(loss: Loss, outputs: LossOutputs, batch: LossBatch) -> Tensor:
    """Compute the loss of a view.

    Raises the errors of the loss. If the loss reads a field of the view that is None, the
    TypeError or AttributeError becomes a ConfigError that names the field.
    """
    try:
        return loss(outputs, batch)
    except (TypeError, AttributeError) as error:
        if "NoneType" not in str(error):
            raise
        assert error.__traceback__ is not None
        read = _names(error.__traceback__.tb_next)
        if "entropies" in read and "logprobs" in outputs.per_token and outputs.entropies is None:
            raise ConfigError(f"the loss {loss!r} {NO_ENTROPIES}") from error
        for name in SOURCES:
            if name in read and getattr(batch, name) is None:
                raise ConfigError(f"the loss {loss!r} {no_field(name)}") from error
        raise


def evaluate_loss(loss: Loss, outputs: LossOutputs, view: LossBatch, head: str) -> Tensor:
    """The loss of the head's outputs for the trained tokens of `view`, a part of the batch.

    `head` names the outputs that a loss is computed from.

    Raises ConfigError if the loss is no floating-point scalar, has no graph although the outputs
    have one, or reads a field that is None.
    """
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in outputs.per_token.values())
    value = _computed(loss, outputs, view)
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
        found = short(value)
        if isinstance(value, Tensor):
            found = f"{value.dtype} of shape {tuple(value.shape)}"
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


def _names(traceback: TracebackType | None) -> set[str]:
    """Names of attributes in the functions of an error's traceback."""
    found: set[str] = set()
    while traceback is not None:
        code = traceback.tb_frame.f_code
        found.update(code.co_names, (x for x in code.co_consts if isinstance(x, str)))
        traceback = traceback.tb_next
    return found


def check_leaves(value: Tensor, outputs: Iterable[Tensor]) -> None:
    """Check that a loss reads no trainable tensor except the model's outputs.

    Args:
        value: the loss; requires a gradient.
        outputs: leaves that it may read.

    Raises UnsupportedError, with shape and dtype, if the loss reads another trainable tensor.
    """
    known = {id(output) for output in outputs}
    todo: list[Node] = [get_gradient_edge(value).node]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo.extend(below for below, _ in node.next_functions if below is not None)
        if node.name() != ACCUMULATES:
            continue
        leaf: Tensor = node.variable  # pyright: ignore[reportAttributeAccessIssue]
        if id(leaf) not in known:
            raise UnsupportedError(
                f"the loss reads a trainable tensor of shape {tuple(leaf.shape)} and dtype "
                f"{leaf.dtype}, which is none of the model's outputs. Compute such a loss from "
                "policy.logprobs() and call backward(), or detach the tensor."
            )
