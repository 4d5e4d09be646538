"""Log-probs that any loss can differentiate: the two halves of a step as one autograd function.

The forward scores the batch without a graph. The backward runs the plan, forwards and backwards,
with the gradients that arrive as weights of the log-probs: by the chain rule sum(weight * log-prob)
has the gradient of whatever was computed from them.

The plan runs at the end of the backward that asks for it, when everything else in it is done. A
stock loss of the same model may be another term of that backward, and fully_shard and
DistributedDataParallel reduce its gradients by state that knows of one backward at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from forkpoint.errors import UnsupportedError
from forkpoint.weight_changes import OptimizerSteps

Weights = dict[str, Tensor | None]
PUT_OFF = 2
"""How often the plan is put off at the end of a backward, behind what is queued there until then:
fully_shard and DistributedDataParallel finish from such a queue, the latter (static_graph) from a
call that queues another."""
BESIDE = (
    "forkpoint: what else the loss of this backward was computed from has its gradients in .grad "
    "already; only those of policy.logprobs are meant here."
)


def sizes_of(weights: Weights) -> list[float]:
    """The norm of each of the weights; ranks with the same batch have the same."""
    return [0.0 if w is None else float(w.double().norm()) for w in weights.values()]


class Pending:
    """A backward that is to come: what it needs, and whether it may still run.

    It holds the batch, the plan and the policy, and no activations.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        parameters: list[nn.Parameter],
        run: Callable[[Weights], None],
        *,
        listens: bool = False,
    ) -> None:
        """
        Args:
            names: of the values.
            parameters: those that train.
            run: adds the gradients of the weighted sum to `.grad`.
            listens: whether DistributedDataParallel takes any backward that reaches a parameter,
                though without a gradient, for that of its last stock forward.
        """
        self.names = names
        self.parameters = parameters
        # What lets the values require a gradient. By the parameters themselves a backward that was
        # asked for gradients of some comes here as well, and is refused.
        self.leaves: list[Tensor] = (
            [torch.zeros((), requires_grad=True)] if listens else list(parameters)
        )
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
        """Run the plan with the gradients as weights, at the end of the backward that calls this.

        Raises UnsupportedError where this is not the one ordinary backward of these values: for
        torch.autograd.grad, create_graph, a second backward, or weights that have changed.
        """
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "the backward of policy.logprobs was asked for a graph of its own (create_graph), "
                "and it has none: gradients of gradients are not computed. Call loss.backward() "
                "without create_graph."
            )
        if not all(map(_accumulates, self.leaves)):
            raise UnsupportedError(
                "gradients of some parameters were asked for (torch.autograd.grad, or "
                "backward(inputs=...)), and the backward of policy.logprobs adds to .grad of all "
                "of them. Call loss.backward(), and read .grad."
            )
        self._check()
        self._put_off(dict(zip(self.names, gradients, strict=True)), PUT_OFF)

    def _check(self) -> None:
        """Raises UnsupportedError where the plan ran already, or the weights are others."""
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

    def _put_off(self, weights: Weights, times: int) -> None:
        """Run the plan when all that is queued for the end of this backward has run."""

        def later() -> None:
            if times:
                self._put_off(weights, times - 1)
            else:
                self._run_last(weights)

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(later)

    def _run_last(self, weights: Weights) -> None:
        self._check()
        self._done = True
        enabled, dtype, cache = self._autocast
        # Backwards run outside of the caller's autocast, on CUDA in another thread.
        autocast = torch.autocast(self._device, dtype, enabled=enabled, cache_enabled=cache)
        try:
            with torch.no_grad(), autocast:
                self._run(weights)
        except BaseException as error:
            error.add_note(BESIDE)
            raise


def _accumulates(leaf: Tensor) -> bool:
    """Whether the backward that runs adds to this leaf's `.grad`."""
    node = get_gradient_edge(leaf).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad asks for this one
        return False


class Differentiable(torch.autograd.Function):
    """Values as they are, whose backward runs the plan."""

    @staticmethod
    def forward(
        ctx: Any, pending: Pending, count: int, *values_and_leaves: Tensor
    ) -> tuple[Tensor, ...]:
        """`count` values [T], then the leaves, which make the result require a gradient."""
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in values_and_leaves[:count])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[None, ...]:
        ctx.pending.backward(grad_outputs)
        return (None,) * (2 + len(grad_outputs) + len(ctx.pending.leaves))
