"""Triton kernel that merges outputs or sums gradients of several launches in one pass.

Every part covers a contiguous range of the result's tokens; the first covers all of them. A part is
read once and the result is written once. If the first part has the result's dtype, it is
overwritten, and tokens that are in no other part are not touched. Import this module only with a
GPU, because it needs Triton.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

MOST_PARTS = 4
"""Most parts of one launch. More parts take several launches, with float32 in between."""

_BLOCK_TOKENS = 16


@triton.jit
def _weight(lse, stride, h, t, begin, mask, total):
    part = tl.load(lse + h * stride + (t - begin), mask=mask, other=-float("inf"))
    return tl.exp(part - total)[:, None]


@triton.jit
def _read(part, t, begin, h, stride_t, stride_h, d, mask):
    at = (t - begin)[:, None] * stride_t + h * stride_h + d[None, :]
    return tl.load(part + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(
    do_not_specialize=[
        *("tokens", "first", "last", "b1", "b2", "b3", "e1", "e2", "e3", "ls0", "ls1", "ls2", "ls3")
    ]
)
def _sum_parts(
    out, total, p0, p1, p2, p3, lse0, lse1, lse2, lse3,
    tokens, first, last, b1, b2, b3, e1, e2, e3,
    st0, st1, st2, st3, sh0, sh1, sh2, sh3, ls0, ls1, ls2, ls3,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW2: tl.constexpr,
    PARTS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = (first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, DIM_POW2)
    inside = t < last
    row = (d < DIM)[None, :]
    sum_TD = _read(p0, t, 0, h, st0, sh0, d, inside[:, None] & row)
    lse = tl.zeros([BLOCK], tl.float32)
    if WEIGHTED:
        lse = tl.load(total + h * tokens + t, mask=inside, other=0.0)
        sum_TD *= _weight(lse0, ls0, h, t, 0, inside, lse)
    if PARTS > 1:
        here = inside & (t >= b1) & (t < e1)
        part_TD = _read(p1, t, b1, h, st1, sh1, d, here[:, None] & row)
        sum_TD += part_TD * _weight(lse1, ls1, h, t, b1, here, lse) if WEIGHTED else part_TD
    if PARTS > 2:
        here = inside & (t >= b2) & (t < e2)
        part_TD = _read(p2, t, b2, h, st2, sh2, d, here[:, None] & row)
        sum_TD += part_TD * _weight(lse2, ls2, h, t, b2, here, lse) if WEIGHTED else part_TD
    if PARTS > 3:
        here = inside & (t >= b3) & (t < e3)
        part_TD = _read(p3, t, b3, h, st3, sh3, d, here[:, None] & row)
        sum_TD += part_TD * _weight(lse3, ls3, h, t, b3, here, lse) if WEIGHTED else part_TD
    to = out + (t[:, None] * HEADS + h) * DIM + d[None, :]
    tl.store(to, sum_TD.to(out.dtype.element_ty), mask=inside[:, None] & row)


def sum_parts(
    parts: list[tuple[int, Tensor]],
    dtype: torch.dtype,
    *,
    lses_HT: list[Tensor] | None = None,
    total_HT: Tensor | None = None,
    alone_is_whole: bool = True,
) -> Tensor:
    """Sum parts (begin, x [T_p, H, D]), where x begins at the token `begin`. The first covers all
    tokens.

    With `lses_HT` [H, T_p] and `total_HT` [H, T], contiguous, part p has the weight exp(lse_p -
    total). The result is contiguous [T, H, D] in `dtype`, summed in float32. It may overwrite the
    first part. `alone_is_whole`: total = lse_0 at tokens that only the first part has.
    """
    while True:
        now, parts = parts[:MOST_PARTS], parts[MOST_PARTS:]
        lses = None if lses_HT is None else lses_HT[:MOST_PARTS]
        kind = torch.float32 if parts else dtype
        result = _launch(now, kind, lses, total_HT, alone_is_whole and not parts)
        if not parts:
            return result
        parts = [(0, result), *parts]
        if lses_HT is not None:
            # The sum so far has the weight 1.
            assert total_HT is not None
            lses_HT = [total_HT, *lses_HT[MOST_PARTS:]]


def _launch(
    parts: list[tuple[int, Tensor]],
    dtype: torch.dtype,
    lses_HT: list[Tensor] | None,
    total_HT: Tensor | None,
    alone_is_whole: bool,
) -> Tensor:
    over = parts[0][1]
    tokens, heads, dim = over.shape
    first, last = 0, tokens
    if over.dtype == dtype and over.is_contiguous():
        out = over
        if alone_is_whole and len(parts) > 1:
            first = min(begin for begin, _ in parts[1:])
            last = max(begin + len(x) for begin, x in parts[1:])
    else:
        out = torch.empty(tokens, heads, dim, dtype=dtype, device=over.device)
    assert all(x.stride(-1) == 1 for _, x in parts)
    filled = [*parts, *[parts[0]] * (MOST_PARTS - len(parts))]
    tensors = [x for _, x in filled]
    begins = [begin for begin, _ in filled[1:]]
    ends = [begin + len(x) for begin, x in filled[1:]]
    # Without weights these are not read, but the kernel needs pointers.
    lses = [out] * MOST_PARTS
    if lses_HT is not None:
        lses = [*lses_HT, *[lses_HT[0]] * (MOST_PARTS - len(lses_HT))]
        assert all(x.stride(-1) == 1 for x in lses)
    grid = (triton.cdiv(last - first, _BLOCK_TOKENS), heads)
    _sum_parts[grid](  # pyright: ignore[reportIndexIssue]
        out,
        out if total_HT is None else total_HT,
        *tensors,
        *lses,
        tokens,
        first,
        last,
        *begins,
        *ends,
        *(x.stride(0) for x in tensors),
        *(x.stride(1) for x in tensors),
        *(x.stride(0) for x in lses),
        HEADS=heads,
        DIM=dim,
        DIM_POW2=triton.next_power_of_2(dim),
        PARTS=len(parts),
        WEIGHTED=lses_HT is not None,
        BLOCK=_BLOCK_TOKENS,
    )
    return out
