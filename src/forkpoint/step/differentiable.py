"""Log-probs with a backward, for any loss: a step in two halves, as one autograd function.

The forward scores the batch without a graph. The backward runs the plan's forwards and backwards,
with the incoming gradients as weights. By the chain rule, sum(weight * log-prob) has the gradient
of the loss that was computed from the log-probs.

The plan runs at the end of the user's backward, after everything else in it. That backward may
include another term of the loss that was computed with the same model in the ordinary way, and the
state of fully_shard and DistributedDataParallel allows one backward at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import Node

from forkpoint.device import on_device
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.fingerprint import Computation
from forkpoint.plan import Plan
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.weight_changes import Weights

GivenWeights = dict[str, Tensor | None]
"""Gradients of a loss with respect to log-probs, values and entropies, by name."""
PUT_OFF = 2
"""Number of times that the plan moves to the end of autograd's queue of final callbacks.
fully_shard and DistributedDataParallel finish in callbacks of this queue. With static_graph,
DistributedDataParallel finishes in a callback that queues another."""
BESIDE = (
    "forkpoint: this concerns only the gradients of policy.logprobs; gradients of other terms of "
    "the loss are in .grad already."
)
MOST = {torch.bfloat16: 0.5, torch.float16: 0.1}
"""Largest difference of two runs' values that rounding explains (root mean square), by dtype of
computation."""
MOST_OTHERWISE = 1e-3


@dataclass(eq=False)
class FirstHalf:
    """Data of the forward of `logprobs` that its backward needs."""

    batch: RolloutBatch
    plan: Plan
    values_T: Tensor
    """Outputs of the head."""
    dtype: torch.dtype
    """The narrowest dtype that the model computes in."""
    settings: Computation
    weights: Weights
    done: bool = False
    """Whether its backward has begun."""

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

        Both runs use the same plan, so their difference is small. This finds changes that torch
        does not count, such as writes to `parameter.data`.
        """
        trained = on_device(np.flatnonzero(self.batch.loss_mask), now_T.device)
        difference = (now_T - self.values_T)[trained].double()
        apart = float(difference.square().mean().sqrt()) if len(difference) else 0.0
        most = MOST.get(self.dtype, MOST_OTHERWISE)
        if apart > most:
            raise UnsupportedError(
                f"the model's values differ from those of policy.logprobs by {apart:.3g}, and "
                f"rounding explains at most {most}. Weights or code have changed in between. Call "
                "loss.backward() before the change, or policy.logprobs again."
            )


@dataclass(eq=False)
class Pending:
    """A backward of `logprobs` that may follow.

    It keeps the batch, the plan and the policy alive, but no activations.
    """

    names: tuple[str, ...]
    """Names of the outputs of `logprobs`."""
    first: FirstHalf
    run: Callable[[GivenWeights], None]
    """Checks that the model has not changed, and adds the gradients of the weighted sum to
    `.grad`."""
    listens: bool = False
    """Whether DistributedDataParallel mistakes any backward that reaches a parameter, even without
    a gradient, for that of its last stock forward."""

    def __post_init__(self) -> None:
        parameters = [p for _, p in self.first.weights.parameters if p.requires_grad]
        # Values require a gradient because of these. With the parameters themselves, a backward for
        # gradients of only some parameters reaches this too, and is refused. A stage of a pipeline
        # may have none.
        self.leaves: list[Tensor] = [*parameters]
        if self.listens or not parameters:
            self.leaves = [torch.zeros((), requires_grad=True)]
        self._autocast = autocast_as_now(self.first.values_T.device)

    def receive(self, gradients: Sequence[Tensor | None], leaves: Sequence[Node]) -> None:
        """Run the plan with the gradients as weights, at the end of the running backward.

        Raises UnsupportedError for a backward that `check_backward` refuses, or for weights that
        have changed.
        """
        check_backward(leaves, "policy.logprobs", done=self.first.done)
        self._put_off(dict(zip(self.names, gradients, strict=True)), PUT_OFF)

    def _put_off(self, given: GivenWeights, times: int) -> None:
        """Run the plan after `times` more turns of the queue of this backward."""
        again = partial(self._put_off, given, times - 1)
        after_this_backward(again if times else partial(self._run_last, given))

    def _run_last(self, given: GivenWeights) -> None:
        _check_unused("policy.logprobs", done=self.first.done)
        try:
            # Backwards run without the caller's autocast, and on CUDA in another thread.
            with torch.no_grad(), self._autocast():
                self.run(given)
        except BaseException as error:
            error.add_note(BESIDE)
            raise


def after_this_backward(work: Callable[[], None]) -> None:
    """Call `work` at the end of the running backward, which raises its error."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(work)


def autocast_as_now(device: torch.device) -> Callable[[], torch.autocast]:
    """Return a function that makes a context with the present autocast, for a later backward."""
    kind, cached = device.type, torch.is_autocast_cache_enabled()
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cached)


def check_backward(leaves: Sequence[Node], what: str, *, done: bool) -> None:
    """Refuse the running backward of `what` unless it is the first one and an ordinary one.

    `leaves`: nodes of the graph that add to `.grad` of leaves.

    Raises UnsupportedError for torch.autograd.grad, create_graph, and a second backward.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            f"the backward of {what} was called with create_graph, and gradients of gradients are "
            "not supported. Call loss.backward() without create_graph."
        )
    if not all(_runs(leaf) for leaf in leaves):
        raise UnsupportedError(
            "gradients of only some tensors were requested (torch.autograd.grad, or "
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


def _runs(node: Node) -> bool:
    """Whether the running backward adds to `.grad` at this node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad requests the gradient of this leaf
        return False


class Differentiable(torch.autograd.Function):
    """A copy of values. Its backward passes the gradients to `receiver.receive`."""

    @staticmethod
    def forward(
        ctx: Any, receiver: Any, count: int, *values_and_leaves: Tensor
    ) -> tuple[Tensor, ...]:
        """`values_and_leaves`: `count` values, then leaves because of which the results require a
        gradient."""
        ctx.receiver, ctx.others = receiver, len(values_and_leaves) - count
        ctx.set_materialize_grads(False)
        # Not views, which torch does not let callers write to.
        return tuple(x.clone() for x in values_and_leaves[:count])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[None, ...]:
        # Not the parameters' present nodes: peft's forwards give adapted experts other ones.
        leaves = [node for node, _ in ctx.next_functions if node is not None]
        ctx.receiver.receive(grad_outputs, leaves)
        return (None,) * (2 + len(grad_outputs) + ctx.others)
