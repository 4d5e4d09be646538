"""Gradients that arrive at a loss in the trainer's backward, and the step that they are kept for.

The values that TRL's losses are given have no graph of the model. A backward ends at them: what
arrives there is kept, and when the backward of an optimizer step's last micro-batch is done, the
step runs with it. So gradients come from the backward that is called, with every factor in it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from forkpoint.errors import UnsupportedError
from forkpoint.step.differentiable import _accumulates
from forkpoint.step.weight_changes import OptimizerSteps


class Arrivals:
    """Gradients that a backward brings to some values, and whether they may still be used."""

    def __init__(self, parameters: Sequence[nn.Parameter], reached: Callable[[], None]) -> None:
        """`parameters`: those that the values depend on. `reached` is called in the backward."""
        self.gradients: list[Tensor | None] = []
        """One for each of the values; None where nothing has arrived."""
        self.used: bool = False
        """Whether a step has run with them."""
        self._parameters = [p for p in parameters if p.requires_grad]
        self._reached = reached
        self._versions = _versions(self._parameters)
        self._gradients = self._now()
        self._steps = OptimizerSteps(self._parameters)

    def at(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The values, with a graph that ends here."""
        self.gradients = [None] * len(values)
        found: Any = _Arriving.apply(self, len(values), *values, *self._parameters)
        return found

    def _now(self) -> list[tuple[int, int] | None]:
        return [None if p.grad is None else (id(p.grad), p.grad._version) for p in self._parameters]

    def receive(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep what a backward brings; it may come in several.

        Raises UnsupportedError for a backward that is not an ordinary one of all parameters, and
        for one after the step.
        """
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "the backward of a loss was asked for a graph of its own (create_graph), and "
                "gradients of gradients are not computed. Call loss.backward() without "
                "create_graph, or use TRL's own trainer."
            )
        if not all(map(_accumulates, self._parameters)):
            raise UnsupportedError(
                "gradients of some tensors were asked for (torch.autograd.grad, or "
                "backward(inputs=...)), and the backward of a loss adds to .grad of all trainable "
                "parameters. Call loss.backward(), and read .grad after the optimizer step's last "
                "micro-batch."
            )
        if self.used:
            raise UnsupportedError(
                "the backward of this loss ran already, and its gradients are in .grad. A second "
                "one would count them twice: add the losses, or call compute_loss again."
            )
        for index, gradient in enumerate(gradients):
            known = self.gradients[index]
            if gradient is not None:
                self.gradients[index] = gradient if known is None else known + gradient
        self._reached()

    def check_weights(self) -> None:
        """Raises UnsupportedError where weights are not those that the loss was computed with."""
        if self._steps.count or _versions(self._parameters) != self._versions:
            raise UnsupportedError(
                "weights have changed between compute_loss and the last backward of its optimizer "
                "step (another optimizer step, or loaded weights), so that the gradients would "
                "belong to another loss. Change weights between optimizer steps."
            )

    def check_gradients(self) -> None:
        """Raises UnsupportedError where something else has added to `.grad` meanwhile."""
        if self._now() != self._gradients:
            raise UnsupportedError(
                "gradients have been added between compute_loss and the last backward of its "
                "optimizer step, such as those of a term of parameters in the loss. On several "
                "ranks they would not be reduced as those of log-probs are. Leave the term out, or "
                "train in one process."
            )


def _versions(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    return [(id(p), p._version) for p in parameters]


class _Arriving(torch.autograd.Function):
    """Values as they are, whose backward keeps what arrives."""

    @staticmethod
    def forward(
        ctx: Any, arrivals: Arrivals, count: int, *values_and_parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """`count` values, then the parameters, which make the result require a gradient."""
        ctx.arrivals, ctx.others = arrivals, len(values_and_parameters) - count
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in values_and_parameters[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.arrivals.receive(gradients)
        return (None,) * (2 + len(gradients) + ctx.others)


def after_this_backward(work: Callable[[], None]) -> None:
    """Call `work` when the backward that runs now is done; its error is the backward's."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(work)


def autocast_as_now(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Makes a context with the autocast that is in force now, for a backward that comes later."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cached = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cached)
