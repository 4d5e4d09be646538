"""Interfaces that the executor calls: features of a pass, and links between stages.

The executor calls the methods of every feature of a step, such as offloading or counting of
experts. Links send and receive around each forward and backward, if other ranks have other blocks
of the model (`hosts/torch_dist/stages.py`). If this rank has all blocks, they do nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.engine.prefix_cache import PrefixCache
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import Instruction
from forkpoint.plan.stages import Stage

Root = tuple[Tensor, Tensor]
"""A tensor that a backward starts from, and the gradient there."""
Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class Feature:
    """A feature that does nothing. Subclasses override the methods that they need.

    `inputs` are those of the instruction's microbatch; in an idle slot, of one untrained token.
    """

    def begin_pass(self, cache: PrefixCache) -> None:
        """A pass begins, with this prefix cache."""

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """An instruction begins. Those that run no microbatch run in this call."""

    def after_receive(self, instruction: Instruction) -> None:
        """Inputs of an instruction that other stages of a pipeline send have arrived."""

    def saved_tensor_hooks(self, instruction: Instruction) -> tuple[Pack, Unpack] | None:
        """Hooks for what autograd saves in a forward. At most one feature of a step has any."""
        return None

    def after_forward(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """A forward has ended. Blocks that run after it are recomputed by checkpoints."""

    def root(self, instruction: Instruction, inputs: MicrobatchInputs, scale: float) -> Root | None:
        """A further root of the microbatch's backward, after a forward with a graph."""
        return None

    def after_backward(self, instruction: Instruction) -> None:
        """A backward has ended."""

    def end_pass(self) -> None:
        """The pass has ended."""


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
