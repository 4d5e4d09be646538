"""Log-probs that any loss can differentiate: the two halves of a step as one autograd function.

The forward scores the batch without a graph. The backward runs the plan, forwards and backwards,
with the gradients that arrive as weights of the log-probs: by the chain rule sum(weight * log-prob)
has the gradient of whatever was computed from them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from forkpoint.device import on_device
from forkpoint.engine.host import Settings
from forkpoint.errors import UnsupportedError
from forkpoint.plan import Plan
from forkpoint.weight_changes import Weights

GivenWeights = dict[str, Tensor | None]
"""Gradients of a loss by name of the values that it was computed from."""


def sizes_of(weights: GivenWeights) -> list[float]:
    """The norm of each of the weights; ranks with the same batch have the same."""
    return [0.0 if w is None else float(w.double().norm()) for w in weights.values()]


MOST = {torch.bfloat16: 0.5, torch.float16: 0.1}
"""By dtype of computation: the most that rounding makes of the difference of two runs' values (root
mean square)."""
MOST_OTHERWISE = 1e-3


@dataclass(eq=False)
class FirstHalf:
    """The forward of `logprobs`, as far as its backward needs it."""

    plan: Plan
    values_T: Tensor
    """Of the head."""
    loss_mask_T: NDArray[np.bool_]
    dtype: torch.dtype
    """The narrowest that the model computes in."""
    settings: Settings
    weights: Weights
    done: bool = False
    """Whether a backward has begun to run."""

    def check_settings(self, now: Settings) -> None:
        """Raises UnsupportedError where the model computes something else than it did."""
        changed = self.settings.changed(now)
        if changed is not None:
            raise UnsupportedError(
                f"the model has changed between policy.logprobs and its backward ({changed}), so "
                "that the gradients would belong to other log-probs. Call loss.backward() before "
                "adapters, modules or settings change, or policy.logprobs again."
            )

    def check_weights(self) -> None:
        """Raises UnsupportedError where weights have changed since."""
        changed = self.weights.changed()
        if changed is not None:
            raise UnsupportedError(
                f"weights have changed between policy.logprobs and its backward ({changed}), so "
                "that the gradients would belong to other log-probs. Call loss.backward() before "
                "weights change, or policy.logprobs again."
            )
        frozen = self.weights.frozen_or_freed()
        if frozen is not None:
            raise UnsupportedError(
                "parameters were frozen or unfrozen between policy.logprobs and its backward "
                f"({frozen}). Call loss.backward() before that, or policy.logprobs again."
            )

    def check_values(self, now_T: Tensor) -> None:
        """Raises UnsupportedError where the second run gives other values than the first.

        Both run one plan, so that they differ by less than two plans do. This finds what nothing
        counts, such as writes to `parameter.data`.
        """
        trained = on_device(np.flatnonzero(self.loss_mask_T), now_T.device)
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
        weights: Weights,
        first: FirstHalf,
        run: Callable[[GivenWeights], None],
    ) -> None:
        """
        Args:
            names: of the values that gradients arrive at.
            weights: of the model, as they were when the values were computed.
            first: the forward.
            run: adds the gradients of the weighted sum to `.grad`, once it has checked that nothing
                has changed since.
        """
        self.names = names
        self.parameters: list[nn.Parameter] = [p for _, p in weights.parameters if p.requires_grad]
        self._first = first
        self._run = run
        self._device = self.parameters[0].device.type
        self._autocast = (
            torch.is_autocast_enabled(self._device),
            torch.get_autocast_dtype(self._device),
            torch.is_autocast_cache_enabled(),
        )

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
        # Those that were frozen since have no node to ask for; the first half names them.
        if not all(_accumulates(p) for p in self.parameters if p.requires_grad):
            raise UnsupportedError(
                "gradients of some parameters were asked for (torch.autograd.grad, or "
                "backward(inputs=...)), and the backward of policy.logprobs adds to .grad of all "
                "of them. Call loss.backward(), and read .grad."
            )
        if self._first.done:
            raise UnsupportedError(
                "the backward of policy.logprobs ran already, and its gradients are in .grad. A "
                "second one would count them twice: add the losses, or call policy.logprobs again."
            )
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
