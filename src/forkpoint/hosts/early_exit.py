"""Early exit: the forward of a microbatch leaves the last block after its prefix cache was
captured.

If no token is trained, only the prefix cache of the last block is needed. An exception skips the
rest of the block. The block catches it, so hooks of the block and the model, such as those of FSDP,
see a forward that returns.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forkpoint.engine.changes import Changes
from forkpoint.hosts.calls import in_forward


class EarlyExit(Exception):
    """Raised in the last block when the rest of its outputs is not needed."""

    def __init__(self, roots: tuple[Tensor, ...]) -> None:
        """`roots`: the last computed tensors, [T, ...] each, from which the backward starts."""
        super().__init__()
        self.roots = roots


def end_in_last_block(block: nn.Module, final_norms: Iterable[nn.Module], changes: Changes) -> None:
    """Let a decoder's last block catch `EarlyExit`, until the changes are undone.

    The decoder's final norms return their input, because the block's output is not used.
    """
    changes.replace_forward(block, functools.partial(_caught, block.forward))
    for norm in final_norms:
        changes.replace_forward(norm, functools.partial(_same, norm.forward))


def _caught(
    forward: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    try:
        forward(hidden_states, *args, **kwargs)
    except EarlyExit as end:
        roots = end.roots
    else:
        raise AssertionError("the last block ran to its end in a microbatch that leaves it early")
    hidden = hidden_states.detach()
    if isinstance(hidden, DTensor):  # each rank has a part; a clone waits for its memory
        hidden = hidden.to_local().clone()
    return _StandIn.apply(hidden, *roots)


def _same(forward: Callable[..., Any], hidden_states: Tensor) -> Tensor:
    return _Same.apply(hidden_states) if in_forward() else forward(hidden_states)


class _Same(torch.autograd.Function):
    """The identity of a tensor."""

    @staticmethod
    def forward(ctx: Any, hidden_BLC: Tensor) -> Tensor:
        return _alias(hidden_BLC)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


def _alias(x: Tensor) -> Tensor:
    """A tensor with the same memory that is no view, because fully_shard warns of modules that
    return views."""
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


class _StandIn(torch.autograd.Function):
    """Returns the block's input instead of its output. The backward gives zeros to the roots."""

    @staticmethod
    def forward(ctx: Any, hidden_BLC: Tensor, *roots: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in roots]
        return _alias(hidden_BLC)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(
                ctx.like, ctx.needs_input_grad[1:], strict=True
            )
        )
        return (None, *zeros)
