"""Links of a rank's blocks with those of other ranks, around a microbatch's forward and backward.

The executor calls them; a rank that has all blocks has none. Stages of a pipeline have others
(`hosts/torch_dist/stages.py`).
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch import Tensor

from forkpoint.engine.feature import Root
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import Instruction
from forkpoint.plan.stages import Stage

T = TypeVar("T")


class Links:
    """No links: the first block reads embeddings, the last one is followed by the head."""

    begins_here: bool = True
    """Whether embeddings, and encoders of images, are this rank's."""
    ends_here: bool = True
    """Whether the head, and so losses and values of tokens, are this rank's."""
    stages: tuple[Stage, ...] = ()
    """Of a pipeline, the first one first."""
    index: int = 0
    """Which of these this rank has."""

    @property
    def stage(self) -> Stage:
        return self.stages[self.index]

    def begin_pass(self, plan: Plan, instructions: Sequence[Instruction]) -> None:
        """A pass of these instructions begins."""

    def receive(self, instruction: Instruction, inputs: MicrobatchInputs) -> Tensor | None:
        """Hidden states [1, T, C] for the first block here; None where it reads embeddings."""
        return None

    def send(self, instruction: Instruction, top: Tensor) -> None:
        """A forward has ended, with what the last block here gives as `top`."""

    def receive_hidden(self, shape: tuple[int, ...]) -> Tensor | None:
        """Hidden states for a forward of input ids of this shape, outside of instructions."""
        return None

    def send_hidden(self, hidden: Tensor) -> None:
        """The last block here gives these, outside of instructions."""

    def roots(self, instruction: Instruction) -> list[Root]:
        """Roots of a backward that other ranks give."""
        return []

    def after_backward(self, instruction: Instruction) -> None:
        """A backward has ended."""

    def end_pass(self, results: Iterable[Tensor]) -> None:
        """The pass has ended: fill in its results where other ranks have computed them."""

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks with other blocks, in the order of these. Collective."""
        return [value]

    def summed(self, x: Tensor) -> Tensor:
        """The sum of a tensor, without a gradient, over ranks with other blocks. Collective."""
        return x
