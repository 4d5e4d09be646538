"""Gradients that the trainer's backward brings to the inputs of a loss, and that a later step uses.

Inputs of TRL's losses have no graph of the model, so a backward ends at them and their gradients
are stored. After the backward of the last micro-batch of an optimizer step, forkpoint's step runs
with these gradients. They contain all factors of the trainer's backward.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from forkpoint.errors import UnsupportedError
from forkpoint.step.differentiable import Differentiable, check_backward
from forkpoint.step.weight_changes import Weights


class Arrivals:
    """Gradients of some values from a backward, and checks that they can still be used."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], reached: Callable[[], None]
    ) -> None:
        """`parameters`: parameters on which the values depend. The backward calls `reached`."""
        self.gradients: list[Tensor | None] = []
        """One gradient for each value; None if the value has none yet."""
        self.used: bool = False
        """Whether a step has run with them."""
        self._reached = reached
        self._weights = Weights(parameters, ())
        self._trained = [p for _, p in self._weights.parameters if p.requires_grad]
        self._gradients = self._now()

    def at(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The values, with a graph whose backward calls `receive`."""
        self.gradients = [None] * len(values)
        found: Any = Differentiable.apply(self, len(values), *values, *self._trained)
        return found

    def _now(self) -> list[tuple[int, int] | None]:
        return [None if p.grad is None else (id(p.grad), p.grad._version) for p in self._trained]

    def receive(self, gradients: Sequence[Tensor | None], leaves: Sequence[Node]) -> None:
        """Add the gradients of one backward to those of earlier backwards.

        Raises UnsupportedError for a backward that is not of all parameters, with create_graph, or
        after the step.
        """
        check_backward(leaves, "this loss", done=self.used)
        for index, gradient in enumerate(gradients):
            known = self.gradients[index]
            if gradient is not None:
                self.gradients[index] = gradient if known is None else known + gradient
        self._reached()

    def check_weights(self) -> None:
        """Raises UnsupportedError if weights have changed since the loss was computed."""
        if (change := self._weights.changed()) is not None:
            raise UnsupportedError(
                "weights have changed between compute_loss and the last backward of its optimizer "
                f"step ({change}), so that the gradients would belong to another loss. Change "
                "weights between optimizer steps."
            )

    def check_gradients(self) -> None:
        """Raises UnsupportedError if other code has added to `.grad` since then."""
        if self._now() != self._gradients:
            raise UnsupportedError(
                "gradients were added between compute_loss and the last backward of its optimizer "
                "step, such as those of a term of parameters in the loss. Ranks would not reduce "
                "them. Leave the term out, or train in one process."
            )
