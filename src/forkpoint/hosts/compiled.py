"""Decoder blocks compiled one by one, in place while rows run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn


class CompiledBlocks:
    """torch.compile of each block of a decoder, for any length of row.

    Attention is left out of the compiled code: it is one operator whatever compiles around it, and
    its tables change from row to row. All blocks run the same few graphs, compiled at their first
    row and for lengths that vary from then on.
    """

    def __init__(self, blocks: nn.ModuleList) -> None:
        self.blocks = blocks
        self._compiled: dict[nn.Module, Callable] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within it the blocks' forwards are the compiled ones; after it they are their own."""
        with ExitStack() as stack:
            for block in self.blocks:
                if block not in self._compiled:
                    self._compiled[block] = torch.compile(block.forward, dynamic=True)
                stack.callback(vars(block).pop, "forward", None)
                block.forward = self._compiled[block]
            yield
