"""Prefix cache that belongs to the end of a segment: one tensor for each, of any shape.

What a recurrent layer's later tokens need of earlier ones is a state, and the last inputs of its
convolution. The protocol is that of `boundary`: microbatches copy what others start from into the
cache, those read it as constants and add their gradients in float32, and in the microbatch's own
backward the sums join what arrives from within the microbatch.

A final state is often read by no token of its own microbatch. So its gradient is not added where it
is used, but where the layer's output is: `keep_states` returns the output, and its backward hands
the states their sums.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forkpoint.engine.boundary import Capture, Key, PrefixCache
from forkpoint.ops.recurrence import ConvolutionTable, StateTable


class RecurrentStates:
    """A microbatch's tables for layers that carry a state, with the cache around them."""

    def __init__(
        self,
        cache: PrefixCache,
        capture: Capture | None,
        table: StateTable,
        windows: ConvolutionTable,
    ) -> None:
        self.cache: PrefixCache = cache
        self.capture: Capture | None = capture
        self.table: StateTable = table
        self.windows: ConvolutionTable = windows

    def initial(self, key: Key, *made_with: Tensor) -> Tensor | None:
        """[S, ...] what the segments of the first level start from; None where all are zero.

        `made_with` is what the state above was made with, of this microbatch: where none of it
            requires gradients, the state needs none.
        """
        if self.table.reading is None:
            return None
        state, gradient = self.cache.read(key)
        anchor = next((x for x in made_with if x.requires_grad), made_with[0])
        return _Read.apply(anchor, state, gradient, self.table)  # type: ignore[return-value]

    def inputs(self, key: Key) -> tuple[Tensor | None, Tensor | None]:
        """[A, C] the last inputs of other microbatches, and their gradients, for
        `gathered_inputs`."""
        if self.table.reading is None:
            return None, None
        state, gradient = self.cache.read(key)
        return state.flatten(0, 1), None if gradient is None else gradient.flatten(0, 1)

    def keep(self, output_T: Tensor, states: dict[Key, Tensor | None]) -> Tensor:
        """Capture the states that other microbatches start from; use what is returned as the
        output.

        `states` are [K, ...], in the order of the table's `kept_index`.
        """
        if self.capture is None or not len(self.table.kept_index):
            return output_T
        for key, state_K in states.items():
            assert state_K is not None and len(state_K) == len(self.table.kept_index)
            output_T = _keep(output_T, state_K, key, self.capture, self.table.kept_index)
        return output_T


def _keep(output_T: Tensor, state_K: Tensor, key: Key, capture: Capture, places: Tensor) -> Tensor:
    state, gradient = capture.cache.state_buffers(key, state_K)
    if capture.takes(key):
        with torch.no_grad():
            state.index_copy_(0, places, state_K)
            if gradient is not None:
                gradient.index_fill_(0, places, 0)
    if gradient is None or not state_K.requires_grad:
        return output_T
    return _Join.apply(output_T, state_K, gradient, places)  # type: ignore[return-value]


class _Join(torch.autograd.Function):
    """The identity of an output, whose backward hands a state what other microbatches left for
    it."""

    @staticmethod
    def forward(
        ctx: Any, output_T: Tensor, state_K: Tensor, gradient: Tensor, places: Tensor
    ) -> Tensor:
        # Not save_for_backward: the buffer is written on purpose until this backward reads it.
        ctx.gradient, ctx.slots, ctx.dtype = gradient, places, state_K.dtype
        return output_T.view_as(output_T)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        (grad_T,) = grad_outputs
        return grad_T, ctx.gradient.index_select(0, ctx.slots).to(ctx.dtype), None, None


class _Read(torch.autograd.Function):
    """States of the cache, as constants whose gradients add up there."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, state: Tensor, gradient: Tensor | None, table: StateTable
    ) -> Tensor:
        ctx.gradient, ctx.table = gradient, table
        assert table.reading is not None
        out_S = state.new_zeros(table.starts, *state.shape[1:])
        return out_S.index_copy_(0, table.reading, state.index_select(0, table.read_index))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[None, None, None, None]:
        (grad_S,) = grad_outputs
        if ctx.gradient is not None:
            read = grad_S.index_select(0, ctx.table.reading).to(ctx.gradient.dtype)
            ctx.gradient.index_add_(0, ctx.table.read_index, read)
        return None, None, None, None
