"""Activation checkpointing of decoder blocks, set for each microbatch.

full: a block keeps only its input, and is recomputed in the backward. selective: only its MLP is
recomputed, because recomputing attention takes longer for each byte that it saves. Both are torch's
non-reentrant
checkpointing. There is no dropout in microbatches, so no state of random generators is kept.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError

# Names that families give to the MLP of a block.
MLP_NAMES = ("mlp", "block_sparse_moe", "shared_mlp", "feed_forward", "moe")


def checkpoint_blocks(
    blocks: Sequence[nn.Module], policy: str, changes: Changes, *, but: int | None
) -> None:
    """Checkpoint all blocks except the one with index `but`, until the changes are undone. A
    microbatch without head ends in that block.

    Raises UnsupportedError if `policy` is "selective" and a block has no known MLP.
    """
    for index, block in enumerate(blocks):
        if policy == "none" or index == but:
            continue
        module = block if policy == "full" else mlp_of(block)
        if module is None:
            raise UnsupportedError(
                "checkpointing is 'selective', which recomputes a block's MLP, and "
                f"{type(block).__name__} has none by the names {', '.join(MLP_NAMES)}. Use "
                "checkpointing='full' or 'none'."
            )
        if policy == "full" or "forward" in vars(module):
            forward = functools.partial(_recomputed, module.forward)
        else:
            # A method, because compiled blocks compare other callables by identity, and would be
            # compiled once for every block.
            forward = types.MethodType(_class_forward_recomputed, module)
        changes.replace_forward(module, forward)


def _recomputed(forward: Callable, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _class_forward_recomputed(module: nn.Module, *args: Any) -> Any:
    return _recomputed(types.MethodType(type(module).forward, module), *args)


def mlp_of(block: nn.Module) -> nn.Module | None:
    """The MLP of a block, which selective checkpointing recomputes; None if none is known."""
    found = (getattr(block, name, None) for name in MLP_NAMES)
    return next((module for module in found if isinstance(module, nn.Module)), None)
