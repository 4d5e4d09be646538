"""The short causal convolution before a recurrence, over a row of segments.

It is the plain convolution of the whole row, in which the first tokens of every segment come out
wrong, for they see the end of whatever lies before them in the row. Those are computed again, from
windows gathered along their paths: their own segment, ancestors in the row, and the last inputs of
ancestors in other rows. So any convolution serves, whatever the lengths, and only a few tokens a
segment are copied.
"""

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forkpoint.ops.attention.kernel import accumulate_dtype
from forkpoint.ops.attention.table import to_device
from forkpoint.plan.recurrence import NOTHING, ConvolutionLayout


class _Source:
    """Entries `to` of a result are rows `from_` of one tensor; some rows are read several times."""

    def __init__(self, to: np.ndarray, from_: np.ndarray, device: torch.device | str) -> None:
        rows, inverse = np.unique(from_, return_inverse=True)

        def tensor(x: np.ndarray) -> Tensor:
            return to_device(torch.from_numpy(np.ascontiguousarray(x)), device)

        self.to: Tensor = tensor(to)
        self.from_: Tensor = tensor(from_)
        self.rows: Tensor = tensor(rows)
        self.inverse: Tensor = tensor(inverse)

    def sums(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """What has been read of each of `rows`, added up in `dtype`."""
        total = grad.new_zeros((len(self.rows), *grad.shape[1:]), dtype=dtype)
        return total.index_add_(0, self.inverse, grad.index_select(0, self.to).to(dtype))


class GatherTable:
    """Where each entry of a gathered tensor comes from: the row, the arena, or nowhere (zero)."""

    def __init__(self, index: np.ndarray, device: torch.device | str) -> None:
        flat = index.ravel()
        self.shape: tuple[int, ...] = index.shape
        (row,), (arena,) = np.nonzero(flat >= 0), np.nonzero(flat < NOTHING)
        self.row: _Source = _Source(row, flat[row], device)
        self.arena: _Source | None = (
            _Source(arena, -2 - flat[arena], device) if len(arena) else None
        )


class ConvolutionTable:
    """A row's windows and tails for convolutions of one width; built once a row."""

    def __init__(self, layout: ConvolutionLayout, *, device: torch.device | str = "cpu") -> None:
        self.slots: Tensor = to_device(torch.from_numpy(layout.slots), device)
        self.windows: GatherTable = GatherTable(layout.window, device)
        self.tails: GatherTable | None = (
            GatherTable(layout.tail, device) if len(layout.tail) else None
        )


def short_convolution(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    table: ConvolutionTable,
    arena_AC: Tensor | None = None,
    arena_grad_AC: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A depthwise causal convolution along every path.

    Args:
        x_TC: [T, C] inputs of the row's tokens.
        weight_CW: [C, W], oldest input first.
        bias_C: [C] or None.
        table: the row's windows, of width W.
        arena_AC: [A, C] inputs of other rows, W - 1 for each state slot; constants here.
        arena_grad_AC: the same in float32 (float64): the backward adds their gradients to it.

    Returns:
        [T, C] before any activation, and [K, W - 1, C] the last inputs of the segments that other
        rows start from, None if there are none.
    """
    width = weight_CW.shape[1]
    assert table.windows.shape[1] == width, f"windows of {table.windows.shape[1]}, not {width}"
    plain = F.conv1d(
        F.pad(x_TC.T[None].to(weight_CW.dtype), (width - 1, 0)),
        weight_CW[:, None],
        bias_C,
        groups=weight_CW.shape[0],
    )[0].T
    window_FWC = gather(x_TC, table.windows, arena_AC, arena_grad_AC)
    dtype = accumulate_dtype(plain.dtype)
    # Operands in the dtype of the plain one, which autocast may have chosen; the sum in float32.
    window_FWC, weight_WC = (x.to(plain.dtype).to(dtype) for x in (window_FWC, weight_CW.T))
    again = (window_FWC * weight_WC).sum(1)
    if bias_C is not None:
        again = again + bias_C.to(plain.dtype).to(dtype)
    y_TC = plain.index_copy(0, table.slots, again.to(plain.dtype))
    if table.tails is None:
        return y_TC, None
    return y_TC, gather(x_TC, table.tails, arena_AC, arena_grad_AC)


def gather(
    x_TC: Tensor, table: GatherTable, arena_AC: Tensor | None, arena_grad_AC: Tensor | None
) -> Tensor:
    """Inputs by index, [*table.shape, C]; gradients of what is read often add up in float32."""
    return _Gather.apply(x_TC, table, arena_AC, arena_grad_AC).unflatten(0, table.shape)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TC, table, arena_AC, arena_grad_AC):  # type: ignore[override]
        # Not save_for_backward: the arena is written on purpose until this backward adds to it.
        ctx.table, ctx.arena_grad, ctx.tokens = table, arena_grad_AC, len(x_TC)
        out = x_TC.new_zeros(int(np.prod(table.shape)), *x_TC.shape[1:])
        out.index_copy_(0, table.row.to, x_TC.index_select(0, table.row.from_))
        if table.arena is not None:
            out.index_copy_(0, table.arena.to, arena_AC.index_select(0, table.arena.from_))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        row, arena = ctx.table.row, ctx.table.arena
        dtype = accumulate_dtype(grad.dtype)
        if arena is not None and ctx.arena_grad is not None:
            ctx.arena_grad.index_add_(0, arena.rows, arena.sums(grad, dtype))
        dx_TC = grad.new_zeros(ctx.tokens, *grad.shape[1:])
        dx_TC.index_copy_(0, row.rows, row.sums(grad, dtype).to(grad.dtype))
        return dx_TC, None, None, None
