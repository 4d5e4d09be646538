"""Decoder blocks compiled one by one, in place while rows run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


class CompiledBlocks:
    """torch.compile of each block of a decoder, for any length of row.

    Attention and recurrences are left out of the compiled code: each is one operator whatever
    compiles around it, and its tables change from row to row. All blocks run the same few graphs,
    compiled at their first row and for lengths that vary from then on.

    Blocks that the model checkpoints are compiled within the checkpoint. Newer versions of
    transformers have it in a block's own forward; compiled as a whole, such a block would run
    eagerly, for compilation gives up where it meets a checkpoint around what is left out.
    """

    def __init__(self, blocks: nn.ModuleList) -> None:
        self.blocks = blocks
        self._compiled: dict[nn.Module, Callable] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within it the blocks' forwards are the compiled ones; after it they are their own."""
        with ExitStack() as stack:
            stack.enter_context(torch._dynamo.config.patch(_dynamo_options()))
            for block in self.blocks:
                if block not in self._compiled:
                    self._compiled[block] = torch.compile(
                        block.forward, dynamic=True, options=_options()
                    )
                attributes = vars(block)
                # Adapted or unwrapped modules may have one set on the instance.
                own = {"forward": attributes["forward"]} if "forward" in attributes else {}
                stack.callback(attributes.update, own)
                stack.callback(attributes.pop, "forward", None)
                block.forward = self._compiled[block]
                if vars(block).get("gradient_checkpointing", False) and block.training:
                    stack.callback(setattr, block, "gradient_checkpointing", True)
                    setattr(block, "gradient_checkpointing", False)  # noqa: B010
                    block.forward = partial(_checkpointed, block, self._compiled[block])
            yield


def _dynamo_options() -> dict[str, Any]:
    """What halves the graphs of a block, and what the host does between them.

    Attention is called from a module within the block; without this the graph ends there twice,
    where that module calls it and where the block calls the module.
    """
    name = "nested_graph_breaks"
    return {name: True} if hasattr(torch._dynamo.config, name) else {}


def _options() -> dict[str, Any] | None:
    """What keeps torch's compiler from asking whether a row is long, and compiling for each answer.

    Sums over a row's tokens and over their channels share one kernel from 4,096 tokens on, or from
    twice the channels on; without the checks they always do.
    """
    from torch._inductor import config

    name = "mix_order_reduction_non_strict_mode"
    return {f"triton.{name}": True} if hasattr(config.triton, name) else None


def _checkpointed(block: Any, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """As `transformers.modeling_layers.GradientCheckpointingLayer` does it."""
    return block._gradient_checkpointing_func(partial(forward, **kwargs), *args)
