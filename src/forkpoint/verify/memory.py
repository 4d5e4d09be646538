"""Strategies to run single rollouts in less memory, tried one after the other on CUDA.

The reference has higher precision, so it needs a copy of the weights and its own gradients. If
memory runs out, logits are computed in parts and blocks are checkpointed. If it runs out again, the
copy of the blocks stays in host memory, and each block is copied to the device while it runs.
"""

import functools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from forkpoint.device import usable_bytes
from forkpoint.engine.changes import Changes
from forkpoint.hosts.checkpointing import checkpoint_blocks

T = TypeVar("T")


@dataclass(frozen=True)
class MemoryStrategy:
    """Options with which a run of single rollouts saves memory."""

    head_tokens: int | None = None
    """Number of tokens whose logits exist at a time; blocks are then checkpointed. None keeps the
    logits of a whole rollout, without checkpoints."""
    streamed: bool = False
    """Whether weights of blocks stay in host memory. Only the copy of the reference may do so."""

    def apply(self, blocks: Sequence[nn.Module], device: torch.device, changes: Changes) -> None:
        """Apply the options to a model, until the changes are undone."""
        if self.streamed:
            _stream(blocks, device, changes)
        elif self.head_tokens is not None:
            checkpoint_blocks(blocks, "full", changes, but=None)


PLAIN = MemoryStrategy()
SMALL = MemoryStrategy(head_tokens=1024)
STREAMED = MemoryStrategy(head_tokens=1024, streamed=True)


def has_room(model: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device has room for a copy of the model in `dtype` and gradients of it.

    True on the CPU, whose memory is not measured.
    """
    if device.type != "cuda":
        return True
    free = usable_bytes(device) - torch.cuda.memory_allocated(device)
    needed = sum(p.numel() * (1 + p.requires_grad) for p in model.parameters()) * dtype.itemsize
    return needed < free


def run_in_memory(
    strategies: tuple[MemoryStrategy, ...],
    run: Callable[[MemoryStrategy], T],
    undo: Callable[[], None],
) -> T:
    """Call `run` with the first strategy, and with the next one if memory runs out.

    `undo` is called between two attempts.
    """
    for strategy in strategies[:-1]:
        try:
            return run(strategy)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
        undo()
        torch.cuda.empty_cache()
    return run(strategies[-1])


class _Block(nn.Module):
    """The forward of a block, called with other parameters."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self._own = block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(*args, **kwargs)


def _stream(blocks: Sequence[nn.Module], device: torch.device, changes: Changes) -> None:
    """Copy the parameters of each block to the device for its forward, and again for its backward.

    Their gradients stay in host memory.
    """

    def run(block: _Block, *args: Any, **kwargs: Any) -> Any:
        there = {name: p.to(device) for name, p in block.named_parameters()}
        return functional_call(block, there, args, kwargs)

    for block in blocks:
        forward = functools.partial(run, _Block(block))
        changes.replace_forward(
            block,
            functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False),
        )
