"""Log-probs that any loss can differentiate: the two halves of a step as one autograd function.

The forward scores the batch without a graph. The backward runs the plan, forwards and backwards,
with the gradients that arrive as weights of the log-probs: by the chain rule sum(weight * log-prob)
has the gradient of the loss that was computed from them.

The plan runs at the end of the backward that asks for it, when everything else in it is done. A
stock loss of the same model may be another term of that backward, and fully_shard and
DistributedDataParallel reduce its gradients by state that knows of one backward at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from forkpoint.device import on_device
from forkpoint.engine.host import Settings
from forkpoint.errors import UnsupportedError
from forkpoint.plan import Plan
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.weight_changes import Weights

GivenWeights = dict[str, Tensor | None]
"""Gradients of a loss by name of the values that it was computed from."""
PUT_OFF = 2
"""How often the plan is put off at the end of a backward, behind the calls queued there until then:
fully_shard and DistributedDataParallel finish from such a queue, the latter (static_graph) from a
call that queues another."""
BESIDE = (
    "forkpoint: what else the loss of this backward was computed from has its gradients in .grad "
    "already; only those of policy.logprobs are meant here."
)
MOST = {torch.bfloat16: 0.5, torch.float16: 0.1}
"""By dtype of computation: the most that rounding makes of the difference of two runs' values (root
mean square)."""
MOST_OTHERWISE = 1e-3


@dataclass(eq=False)
class FirstHalf:
    """The forward of `logprobs`, as far as its backward needs it."""

    batch: RolloutBatch
    plan: Plan
    values_T: Tensor
    """Of the head."""
    dtype: torch.dtype
    """The narrowest that the model computes in."""
    settings: Settings
    weights: Weights
    done: bool = False
    """Whether a backward has begun to run."""

    def check_unused(self) -> None:
        """Raises UnsupportedError if a backward ran already."""
        if self.done:
            raise UnsupportedError(
                "the backward of policy.logprobs ran already, and its gradients are in .grad. A "
                "second one would count them twice: add the losses, or call policy.logprobs again."
            )

    def check_unchanged(self, settings: Settings) -> None:
        """Raises UnsupportedError if settings or weights of the model have changed since."""
        setting, weight = self.settings.changed(settings), self.weights.changed()
        if setting is not None or weight is not None:
            what = f"the model has changed ({setting})"
            if setting is None:
                what = f"weights have changed ({weight})"
            raise UnsupportedError(
                f"{what} between policy.logprobs and its backward, so that the gradients would "
                "belong to other log-probs. Call loss.backward() first, or policy.logprobs again."
            )

    def check_values(self, now_T: Tensor) -> None:
        """Raises UnsupportedError if the second run gives other values than the first.

        Both run one plan, so that they differ by less than two plans do. This finds changes that
        nothing counts, such as writes to `parameter.data`.
        """
        trained = on_device(np.flatnonzero(self.batch.loss_mask), now_T.device)
        difference = (now_T - self.values_T)[trained].double()
        apart = float(difference.square().mean().sqrt()) if len(difference) else 0.0
        most = MOST.get(self.dtype, MOST_OTHERWISE)
        if apart > most:
            raise UnsupportedError(
                "the model gives other values than policy.logprobs has given: they differ by "
                f"{apart:.3g}, where rounding explains at most {most}. Weights or code have "
                "changed in between (parameter.data, say). Call loss.backward() before that, or "
                "policy.logprobs again."
            )


class Pending:
    """A backward that is to come, and whether it may still run.

    It holds the batch, the plan and the policy, and no activations.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        first: FirstHalf,
        run: Callable[[GivenWeights], None],
        *,
        listens: bool = False,
    ) -> None:
        """
        Args:
            names: of the values that gradients arrive at.
            first: the forward.
            run: adds the gradients of the weighted sum to `.grad`, once it has checked that nothing
                has changed since.
            listens: whether DistributedDataParallel takes any backward that reaches a parameter,
                though without a gradient, for that of its last stock forward.
        """
        self.names = names
        parameters = [p for _, p in first.weights.parameters if p.requires_grad]
        # These let the values require a gradient. By the parameters themselves a backward that was
        # asked for gradients of some comes here as well, and is refused.
        self.leaves: list[Tensor] = (
            [torch.zeros((), requires_grad=True)] if listens else list(parameters)
        )
        self._first = first
        self._run = run
        self._device = parameters[0].device.type
        self._autocast = (
            torch.is_autocast_enabled(self._device),
            torch.get_autocast_dtype(self._device),
            torch.is_autocast_cache_enabled(),
        )

    def backward(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Run the plan with the gradients as weights, at the end of the backward that calls this.

        Raises UnsupportedError unless this is the one ordinary backward of these values: for
        torch.autograd.grad, create_graph, a second backward, or weights that have changed.
        """
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "the backward of policy.logprobs was asked for a graph of its own (create_graph), "
                "and it has none: gradients of gradients are not computed. Call loss.backward() "
                "without create_graph."
            )
        # Those that were frozen since have no node to ask for; the first half names them.
        if not all(_accumulates(leaf) for leaf in self.leaves if leaf.requires_grad):
            raise UnsupportedError(
                "gradients of some parameters were asked for (torch.autograd.grad, or "
                "backward(inputs=...)), and the backward of policy.logprobs adds to .grad of all "
                "of them. Call loss.backward(), and read .grad."
            )
        self._first.check_unused()
        self._put_off(dict(zip(self.names, gradients, strict=True)), PUT_OFF)

    def _put_off(self, given: GivenWeights, times: int) -> None:
        """Run the plan when all that is queued for the end of this backward has run."""

        def later() -> None:
            if times:
                self._put_off(given, times - 1)
            else:
                self._run_last(given)

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(later)

    def _run_last(self, given: GivenWeights) -> None:
        self._first.check_unused()
        enabled, dtype, cache = self._autocast
        # Backwards run outside of the caller's autocast, on CUDA in another thread.
        autocast = torch.autocast(self._device, dtype, enabled=enabled, cache_enabled=cache)
        try:
            with torch.no_grad(), autocast:
                self._run(given)
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
