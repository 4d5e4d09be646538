"""Log-probs that any loss can differentiate: the two halves of a step as one autograd function.

The forward scores the batch without a graph. The backward runs the plan, forwards and backwards,
with the gradients that arrive as weights of the log-probs: by the chain rule sum(weight * log-prob)
has the gradient of the loss that was computed from them.

The plan runs at the end of the backward that asks for it, when everything else in it is done. A
stock loss of the same model may be another term of that backward, and fully_shard and
DistributedDataParallel reduce its gradients by state that knows of one backward at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from forkpoint.device import on_device
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.fingerprint import Computation
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
    settings: Computation
    weights: Weights
    done: bool = False
    """Whether a backward has begun to run."""

    def check_unchanged(self, settings: Computation) -> None:
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
                "the model gives other values than policy.logprobs gave: they differ by "
                f"{apart:.3g}, and rounding explains at most {most}. Weights or code have changed "
                "in between. Call loss.backward() before the change, or policy.logprobs again."
            )


@dataclass(eq=False)
class Pending:
    """A backward that is to come, and whether it may still run.

    It holds the batch, the plan and the policy, and no activations.
    """

    names: tuple[str, ...]
    """Of the values that gradients arrive at."""
    first: FirstHalf
    run: Callable[[GivenWeights], None]
    """Adds the gradients of the weighted sum to `.grad`, once it has checked that nothing has
    changed since."""
    listens: bool = False
    """Whether DistributedDataParallel takes any backward that reaches a parameter, though without a
    gradient, for that of its last stock forward."""

    def __post_init__(self) -> None:
        parameters = [p for _, p in self.first.weights.parameters if p.requires_grad]
        # These let the values require a gradient. By the parameters themselves a backward that was
        # asked for gradients of some comes here as well, and is refused.
        self.leaves: list[Tensor] = (
            [torch.zeros((), requires_grad=True)] if self.listens else list(parameters)
        )
        self._autocast = autocast_as_now(parameters[0].device)

    def receive(self, gradients: Sequence[Tensor | None]) -> None:
        """Run the plan with the gradients as weights, at the end of the backward that calls this.

        Raises UnsupportedError for a backward that `check_backward` refuses, or for weights that
        have changed.
        """
        check_backward(self.leaves, "policy.logprobs", done=self.first.done)
        self._put_off(dict(zip(self.names, gradients, strict=True)), PUT_OFF)

    def _put_off(self, given: GivenWeights, times: int) -> None:
        """Run the plan when all that is queued for the end of this backward has run."""
        again = partial(self._put_off, given, times - 1)
        after_this_backward(again if times else partial(self._run_last, given))

    def _run_last(self, given: GivenWeights) -> None:
        _check_unused("policy.logprobs", done=self.first.done)
        try:
            # Backwards run outside of the caller's autocast, on CUDA in another thread.
            with torch.no_grad(), self._autocast():
                self.run(given)
        except BaseException as error:
            error.add_note(BESIDE)
            raise


def after_this_backward(work: Callable[[], None]) -> None:
    """Call `work` when the backward that runs now is done; its error is the backward's."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(work)


def autocast_as_now(device: torch.device) -> Callable[[], torch.autocast]:
    """Makes a context with the autocast that is in force now, for a backward that comes later."""
    kind, cached = device.type, torch.is_autocast_cache_enabled()
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cached)


def check_backward(leaves: Sequence[Tensor], what: str, *, done: bool) -> None:
    """Refuse a backward of `what`, which is running, unless it is the only one and an ordinary one.

    Raises UnsupportedError for torch.autograd.grad, create_graph, and a second backward.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            f"the backward of {what} was asked for a graph of its own (create_graph), and "
            "gradients of gradients are not computed. Call loss.backward() without create_graph."
        )
    # Those that were frozen since have no node to ask for; `Weights.changed` names them.
    if not all(_accumulates(leaf) for leaf in leaves if leaf.requires_grad):
        raise UnsupportedError(
            "gradients of some tensors were asked for (torch.autograd.grad, or "
            f"backward(inputs=...)), and the backward of {what} adds to .grad of all trainable "
            "parameters. Call loss.backward(), and read .grad after the step."
        )
    _check_unused(what, done=done)


def _check_unused(what: str, *, done: bool) -> None:
    if done:
        raise UnsupportedError(
            f"the backward of {what} ran already, and its gradients are in .grad. A second one "
            f"would count them twice: add the losses, or compute {what} again."
        )


def _accumulates(leaf: Tensor) -> bool:
    """Whether the backward that runs adds to this leaf's `.grad`."""
    node = get_gradient_edge(leaf).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad asks for this one
        return False


class Differentiable(torch.autograd.Function):
    """An identity. Its backward passes the gradients to `receiver.receive`."""

    @staticmethod
    def forward(
        ctx: Any, receiver: Any, count: int, *values_and_leaves: Tensor
    ) -> tuple[Tensor, ...]:
        """`count` values, then the leaves, which make the result require a gradient."""
        ctx.receiver, ctx.others = receiver, len(values_and_leaves) - count
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in values_and_leaves[:count])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[None, ...]:
        ctx.receiver.receive(grad_outputs)
        return (None,) * (2 + len(grad_outputs) + ctx.others)
