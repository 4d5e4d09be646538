"""Log-probs that any loss can differentiate: the two halves of a step as one autograd function.

The forward scores the batch without a graph. The backward runs the plan, forwards and backwards,
with the gradients that arrive as weights of the log-probs: by the chain rule sum(weight * log-prob)
has the gradient of whatever was computed from them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from forkpoint.errors import UnsupportedError
from forkpoint.weight_changes import OptimizerSteps

Weights = dict[str, Tensor | None]


def sizes_of(weights: Weights) -> list[float]:
    """The norm of each of the weights; ranks with the same batch have the same."""
    return [0.0 if w is None else float(w.double().norm()) for w in weights.values()]


class Pending:
    """A backward that is to come: what it needs, and whether it may still run.

    It holds the batch, the plan and the policy, and no activations.
    """

    def __init__(
        self, names: tuple[str, ...], parameters: list[nn.Parameter], run: Callable[[Weights], None]
    ) -> None:
        """`run` adds the gradients of the weighted sum to `.grad`."""
        self.names = names
        self.parameters = parameters
        self._run = run
        self._versions = [(id(p), p._version) for p in parameters]
        self._steps = OptimizerSteps(parameters)
        self._device = parameters[0].device.type
        self._autocast = (
            torch.is_autocast_enabled(self._device),
            torch.get_autocast_dtype(self._device),
            torch.is_autocast_cache_enabled(),
        )
        self._done = False

    def backward(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Run the plan with the gradients as weights.

        Raises UnsupportedError where this is not the one ordinary backward of these values: for
        torch.autograd.grad, create_graph, a second backward, or weights that have changed.
        """
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "the backward of policy.logprobs was asked for a graph of its own (create_graph), "
                "and it has none: gradients of gradients are not computed. Call loss.backward() "
                "without create_graph."
            )
        if not all(map(_accumulates, self.parameters)):
            raise UnsupportedError(
                "gradients of some parameters were asked for (torch.autograd.grad, or "
                "backward(inputs=...)), and the backward of policy.logprobs adds to .grad of all "
                "of them. Call loss.backward(), and read .grad."
            )
        if self._done:
            raise UnsupportedError(
                "the backward of policy.logprobs ran already, and its gradients are in .grad. A "
                "second one would count them twice: add the losses, or call policy.logprobs again."
            )
        versions = [(id(p), p._version) for p in self.parameters]
        if self._steps.count or self._versions != versions:
            raise UnsupportedError(
                "weights have changed between policy.logprobs and its backward (an optimizer step, "
                "or loaded weights), so that the gradients would belong to other log-probs. Call "
                "loss.backward() before the optimizer's step, or policy.logprobs again."
            )
        self._done = True
        with ExitStack() as stack:
            # Backwards run outside of the caller's autocast, on CUDA in another thread.
            enabled, dtype, cache = self._autocast
            stack.enter_context(
                torch.autocast(self._device, dtype, enabled=enabled, cache_enabled=cache)
            )
            self._run(dict(zip(self.names, gradients, strict=True)))


def _accumulates(parameter: nn.Parameter) -> bool:
    """Whether the backward that runs adds to this parameter's `.grad`."""
    node = get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad asks for this one
        return False


class Differentiable(torch.autograd.Function):
    """Values as they are, whose backward runs the plan."""

    @staticmethod
    def forward(
        ctx: Any, pending: Pending, count: int, *values_and_parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """`count` values [T], then the parameters, which make the result require a gradient."""
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in values_and_parameters[:count])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[None, ...]:
        ctx.pending.backward(grad_outputs)
        return (None,) * (2 + len(grad_outputs) + len(ctx.pending.parameters))
