"""Gradients that arrive at a loss in the trainer's backward, and the step that they are kept for.

The values that TRL's losses are given have no graph of the model. A backward ends at them: what
arrives there is kept, and when the backward of an optimizer step's last micro-batch is done, the
step runs with it. So gradients come from the backward that is called, with every factor in it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from forkpoint.errors import UnsupportedError
from forkpoint.step.differentiable import Differentiable, check_backward
from forkpoint.step.weight_changes import Weights


class Arrivals:
    """Gradients that a backward brings to some values, and whether they may still be used."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], reached: Callable[[], None]
    ) -> None:
        """`parameters`: those that the values depend on. `reached` is called in the backward."""
        self.gradients: list[Tensor | None] = []
        """One for each of the values; None where nothing has arrived."""
        self.used: bool = False
        """Whether a step has run with them."""
        self._reached = reached
        self._weights = Weights(parameters, ())
        self._trained = [p for _, p in self._weights.parameters if p.requires_grad]
        self._gradients = self._now()

    def at(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The values, with a graph that ends here."""
        self.gradients = [None] * len(values)
        found: Any = Differentiable.apply(self, len(values), *values, *self._trained)
        return found

    def _now(self) -> list[tuple[int, int] | None]:
        return [None if p.grad is None else (id(p.grad), p.grad._version) for p in self._trained]

    def receive(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one backward to those of earlier backwards.

        Raises UnsupportedError for a backward that is not an ordinary one of all parameters, and
        for one after the step.
        """
        check_backward(self._trained, "this loss", done=self.used)
        for index, gradient in enumerate(gradients):
            known = self.gradients[index]
            if gradient is not None:
                self.gradients[index] = gradient if known is None else known + gradient
        self._reached()

    def check_weights(self) -> None:
        """Raises UnsupportedError where weights are not those that the loss was computed with."""
        if (change := self._weights.changed()) is not None:
            raise UnsupportedError(
                "weights have changed between compute_loss and the last backward of its optimizer "
                f"step ({change}), so that the gradients would belong to another loss. Change "
                "weights between optimizer steps."
            )

    def check_gradients(self) -> None:
        """Raises UnsupportedError where something else has added to `.grad` meanwhile."""
        if self._now() != self._gradients:
            raise UnsupportedError(
                "gradients were added between compute_loss and the last backward of its optimizer "
                "step, such as those of a term of parameters in the loss. Ranks would not reduce "
                "them. Leave the term out, or train in one process."
            )
