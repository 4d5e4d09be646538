"""The short causal convolution before a recurrence, over a microbatch of segments.

It is the plain convolution of the whole microbatch, which is wrong at the first tokens of every
segment, because they see the tokens before them in the microbatch. These are computed again from
windows that are gathered along their paths: from their own segment, ancestors in the microbatch,
and the last inputs of ancestors in other microbatches. So any convolution can be used, for any
lengths, and only a few tokens of a segment are copied.
"""

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forkpoint.device import on_device
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.tree import NOTHING, ConvolutionLayout


class _Source:
    """Indices of a gather: entries `to` of the result are rows `from_` of a tensor. Rows may
    repeat."""

    def __init__(self, to: np.ndarray, from_: np.ndarray, device: torch.device | str) -> None:
        rows, inverse = np.unique(from_, return_inverse=True)
        self.to: Tensor = on_device(to, device)
        self.from_: Tensor = on_device(from_, device)
        self.rows: Tensor = on_device(rows, device)
        self.inverse: Tensor = on_device(inverse, device)

    def sums(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum the gradients of all reads of each of `rows`, in `dtype`."""
        total = grad.new_zeros((len(self.rows), *grad.shape[1:]), dtype=dtype)
        return total.index_add_(0, self.inverse, grad.index_select(0, self.to).to(dtype))


class GatherTable:
    """Sources of the entries of a gathered tensor: the microbatch, the cache, or none (zero)."""

    def __init__(self, flat: np.ndarray, device: torch.device | str) -> None:
        self.entries: int = len(flat)
        (row,), (cache,) = np.nonzero(flat >= 0), np.nonzero(flat < NOTHING)
        self.row: _Source = _Source(row, flat[row], device)
        self.cache: _Source | None = (
            _Source(cache, -2 - flat[cache], device) if len(cache) else None
        )


class ConvolutionTable:
    """A microbatch's windows and tails for convolutions of one width; built once a microbatch."""

    def __init__(self, layout: ConvolutionLayout, *, device: torch.device | str = "cpu") -> None:
        self.width: int = layout.window.shape[1]
        self.firsts: int = len(layout.places)
        """F, the number of places with inputs outside their own segment."""
        self.places: Tensor = on_device(layout.places, device)
        """[F] these places."""
        self.tails: int = len(layout.tail)
        """Number of segments that other microbatches continue."""
        both = np.concatenate([layout.window.ravel(), layout.tail.ravel()])
        self.inputs: GatherTable = GatherTable(both, device)
        """Sources of the inputs of windows, then of tails."""


def gathered_inputs(
    x_TC: Tensor,
    table: ConvolutionTable,
    cache_AC: Tensor | None = None,
    cache_grad_AC: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gather a convolution's inputs across segments, and the inputs that other microbatches need.

    Args:
        x_TC: [T, C] inputs of the microbatch's tokens.
        cache_AC: [A, C] inputs of other microbatches, W - 1 for each state slot; constants here.
        cache_grad_AC: the same in float32 (float64): the backward adds their gradients to it.

    Returns:
        x_TC, with which the caller must continue, so that its gradient is computed in one piece;
        [F, W, C] the windows of `table.places`, oldest first; and [K, W - 1, C] the last inputs of
        the segments that other microbatches continue, or None.
    """
    x_TC, found = _Gather.apply(x_TC, table.inputs, cache_AC, cache_grad_AC)
    windows, tails = found.split([table.firsts * table.width, table.tails * (table.width - 1)])
    windows_FWC = windows.unflatten(0, (table.firsts, table.width))
    if not table.tails:
        return x_TC, windows_FWC, None
    return x_TC, windows_FWC, tails.unflatten(0, (table.tails, table.width - 1))


def short_convolution(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, windows_FWC: Tensor, index_F: Tensor
) -> Tensor:
    """A depthwise causal convolution along every path.

    In compiled code it is a sum of products with shifted inputs, which is fused with surrounding
    operations into one pass over the tokens. The library's convolution takes three, because it
    needs channels first. Products are summed in float32 (float64) and rounded once.

    Args:
        x_TC: [T, C] inputs of the microbatch's tokens.
        weight_CW: [C, W], oldest input first.
        bias_C: [C] or None.
        windows_FWC: [F, W, C] the windows of `index_F`, from `gathered_inputs`.
        index_F: [F] places with inputs outside their own segment.

    Returns:
        [T, C] before any activation.
    """
    dtype = _operand_dtype(x_TC, weight_CW)
    wide = accumulate_dtype(dtype)
    x_TC, weight_CW, windows_FWC = (x.to(dtype) for x in (x_TC, weight_CW, windows_FWC))
    bias_C = None if bias_C is None else bias_C.to(dtype)
    if torch.compiler.is_compiling():
        plain_TC = _ShiftedSum.apply(x_TC, weight_CW, bias_C)
    else:
        inputs_1CT = F.pad(x_TC.T[None], (weight_CW.shape[1] - 1, 0))
        plain_TC = F.conv1d(inputs_1CT, weight_CW[:, None], bias_C, groups=len(weight_CW))[0].T
    again_FC = (windows_FWC.to(wide) * weight_CW.T.to(wide)).sum(1)
    if bias_C is not None:
        again_FC = again_FC + bias_C.to(wide)
    return plain_TC.index_copy(0, index_F, again_FC.to(dtype))


def _operand_dtype(x_TC: Tensor, weight_CW: Tensor) -> torch.dtype:
    """The dtype of the operands. Autocast casts convolutions."""
    kind = x_TC.device.type
    if torch.is_autocast_enabled(kind) and weight_CW.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return weight_CW.dtype


class _ShiftedSum(torch.autograd.Function):
    """The plain convolution, as a sum of products with shifted inputs.

    The backward shifts the gradient instead of the inputs. With autograd, compiled code would save
    the padded inputs, in float32, for every shift.

    In torch 2.11, Dynamo makes every tensor and size in a Function's forward an output. If the
    result has two names, as after a cast to its own dtype, the gradient reaches the other name and
    is lost silently (pytorch issue 180642; fixed in torch 2.12.1). A size that is a constant ends
    compilation. So the forward has neither.
    """

    @staticmethod
    def forward(ctx, x_TC, weight_CW, bias_C):  # type: ignore[override]
        ctx.save_for_backward(x_TC, weight_CW)
        ctx.biased = bias_C is not None
        wide = accumulate_dtype(x_TC.dtype)
        x, tokens = x_TC.to(wide), len(x_TC)
        # No range over weight_CW.shape[1], because it may be a dynamic size.
        newest, *older = reversed(weight_CW.to(wide).unbind(1))
        total = x * newest
        for back, weight_C in enumerate(older, 1):
            total = total + F.pad(x, (0, 0, back, 0))[:tokens] * weight_C
        if bias_C is not None:
            total = total + bias_C.to(wide)
        # Never `to`: see above.
        return total if total.dtype == x_TC.dtype else total.to(x_TC.dtype)

    @staticmethod
    def backward(ctx, grad_TC):  # type: ignore[override]
        x_TC, weight_CW = ctx.saved_tensors
        wide, width = accumulate_dtype(x_TC.dtype), weight_CW.shape[1]
        x, weight, grad = x_TC.to(wide), weight_CW.to(wide), grad_TC.to(wide)
        shifted = [F.pad(grad, (0, 0, 0, back))[back:] for back in reversed(range(width))]
        dx = shifted[-1] * weight[:, -1]
        for i in range(width - 1):
            dx = dx + shifted[i] * weight[:, i]
        dweight = torch.stack([(x * s).sum(0) for s in shifted], 1)
        dbias = grad.sum(0).to(x_TC.dtype) if ctx.biased else None
        return dx.to(x_TC.dtype), dweight.to(x_TC.dtype), dbias


class _Gather(torch.autograd.Function):
    """Returns a tensor unchanged, and rows of it and of the cache by index.

    Gradients of rows that are read several times add up in float32, before they are added to the
    tensor's gradient.
    """

    @staticmethod
    def forward(ctx, x_TC, table, cache_AC, cache_grad_AC):  # type: ignore[override]
        # Not save_for_backward: the cache may be written until this backward adds to it.
        ctx.table, ctx.cache_grad = table, cache_grad_AC
        out = x_TC.new_zeros(table.entries, *x_TC.shape[1:])
        out.index_copy_(0, table.row.to, x_TC.index_select(0, table.row.from_))
        if table.cache is not None:
            out.index_copy_(0, table.cache.to, cache_AC.index_select(0, table.cache.from_))
        return x_TC.view_as(x_TC), out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TC, grad):  # type: ignore[override]
        row, cache = ctx.table.row, ctx.table.cache
        dtype = accumulate_dtype(grad.dtype)
        if cache is not None and ctx.cache_grad is not None:
            ctx.cache_grad.index_add_(0, cache.rows, cache.sums(grad, dtype))
        sums = row.sums(grad, dtype) + grad_TC.index_select(0, row.rows)
        return grad_TC.index_copy(0, row.rows, sums.to(grad_TC.dtype)), None, None, None
