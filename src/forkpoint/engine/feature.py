"""Interface of a pass's features, such as offloading or counting of experts.

The executor calls all features of a step at the same moments and knows none of them by name.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.engine.prefix_cache import PrefixCache
from forkpoint.plan.program import Instruction

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
