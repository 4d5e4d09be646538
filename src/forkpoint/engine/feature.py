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
"""A tensor from which a backward starts, and its gradient."""
Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class Feature:
    """Base class of features, without effect. Subclasses override methods.

    `inputs` are those of the instruction's microbatch; in an idle slot, of one untrained token.
    """

    cache: PrefixCache
    """Prefix cache of the running pass."""

    def begin_pass(self, cache: PrefixCache) -> None:
        """Called at the beginning of a pass, with its prefix cache."""
        self.cache = cache

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """Called at the beginning of an instruction. Instructions without a microbatch run in this
        call."""

    def after_receive(self, instruction: Instruction) -> None:
        """Called when an instruction's inputs from other stages of a pipeline have arrived."""

    def saved_tensor_hooks(self, instruction: Instruction) -> tuple[Pack, Unpack] | None:
        """Hooks for tensors that autograd saves in a forward. At most one feature of a step has
        any."""
        return None

    def after_forward(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """Called at the end of a forward. Blocks that run after it are recomputed by
        checkpoints."""

    def root(self, instruction: Instruction, inputs: MicrobatchInputs, scale: float) -> Root | None:
        """A further root of the microbatch's backward, after a forward with a graph."""
        return None

    def after_backward(self, instruction: Instruction) -> None:
        """A backward has ended."""

    def end_pass(self) -> None:
        """The pass has ended."""


T = TypeVar("T")


class Links:
    """Base class of links, for a rank with all blocks: no sends and receives."""

    begins_here: bool = True
    """Whether this rank has the embeddings and encoders of images."""
    ends_here: bool = True
    """Whether this rank has the head, and so computes losses and values of tokens."""
    stages: tuple[Stage, ...] = ()
    """Stages of the pipeline in order; empty without a pipeline."""
    index: int = 0
    """Index of this rank's stage."""

    @property
    def stage(self) -> Stage:
        return self.stages[self.index]

    def begin_pass(self, plan: Plan, instructions: Sequence[Instruction]) -> None:
        """Called at the beginning of a pass of these instructions."""

    def receive(self, instruction: Instruction, inputs: MicrobatchInputs) -> Tensor | None:
        """Receive hidden states [1, T, C] for this rank's first block; None if it reads
        embeddings."""
        return None

    def send(self, instruction: Instruction, top: Tensor) -> None:
        """Send the output `top` of this rank's last block, at the end of a forward."""

    def receive_hidden(self, shape: tuple[int, ...]) -> Tensor | None:
        """Receive hidden states for input ids of this shape, outside of instructions."""
        return None

    def send_hidden(self, hidden: Tensor) -> None:
        """Send the output of this rank's last block, outside of instructions."""

    def roots(self, instruction: Instruction) -> list[Root]:
        """Receive roots of a backward from other ranks."""
        return []

    def after_backward(self, instruction: Instruction) -> None:
        """A backward has ended."""

    def end_pass(self, results: Iterable[Tensor]) -> None:
        """Called at the end of a pass. Receives results that other ranks have computed."""

    def exchange(self, value: T) -> list[T]:
        """Exchange the values of all stages, in order. Collective."""
        return [value]

    def summed(self, x: Tensor) -> Tensor:
        """Sum a tensor, without a gradient, over stages. Collective."""
        return x
