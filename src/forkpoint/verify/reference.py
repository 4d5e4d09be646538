"""The reference of `verify`: ordinary training on a copy of the model in higher precision."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from forkpoint.engine.changes import Changes
from forkpoint.hosts.checkpointing import checkpoint_blocks
from forkpoint.verify.memory import MemoryStrategy


def save_memory(
    blocks: nn.ModuleList, strategy: MemoryStrategy, device: torch.device, changes: Changes
) -> None:
    """Let blocks run with less memory, until the changes are undone."""
    if strategy.streamed:
        _stream(blocks, device, changes)
    elif strategy.checkpointed:
        checkpoint_blocks(blocks, "full", changes, but=None)


class _Called(nn.Module):
    """A block's own forward, to be called with other parameters."""

    def __init__(self, block: nn.Module, own: Callable[..., Any]) -> None:
        super().__init__()
        self.block = block
        self._own = own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(*args, **kwargs)


def _stream(blocks: nn.ModuleList, device: torch.device, changes: Changes) -> None:
    """Bring each block's parameters to the device for its forward, and again for its backward.

    Their gradients are left in the host's memory.
    """
    for block in blocks:
        called = _Called(block, block.forward)

        def run(called: _Called, *args: Any, **kwargs: Any) -> Any:
            there = {name: p.to(device) for name, p in called.named_parameters()}
            return functional_call(called, there, args, kwargs)

        recomputed = functools.partial(
            checkpoint,
            functools.partial(run, called),
            use_reentrant=False,
            preserve_rng_state=False,
        )
        changes.replace_forward(block, recomputed)
