"""Merges the partial results of a microbatch's launches by log-sum-exp."""

from typing import NamedTuple

import torch
from torch import Tensor

from forkpoint.ops.attention.source import dense
from forkpoint.ops.dtypes import accumulate_dtype


class Part(NamedTuple):
    """Result of one launch's forward for the queries q_begin to q_begin + len(o)."""

    q_begin: int
    o_THE: Tensor
    lse_HT: Tensor


def merge(parts: list[Part], sinks_H: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """O = sum over parts of exp(lse_p - LSE) o_p, with LSE = log(sum exp lse_p + exp sink).

    parts: the first covers all queries, each later one a contiguous range. Returns o [T, H, E] in
    `dtype` and lse [H, T] in float32 (float64 for float64), contiguous; inputs may be reused.
    """
    _, first_THE, lse_HT = parts[0]
    if len(parts) == 1 and sinks_H is None:
        return dense(first_THE, dtype), lse_HT.contiguous()

    total_HT = lse_HT.clone(memory_format=torch.contiguous_format)
    for begin, _, part_HT in parts[1:]:
        view_HT = total_HT[:, begin : begin + part_HT.shape[1]]
        torch.logaddexp(view_HT, part_HT, out=view_HT)
    if sinks_H is not None:
        torch.logaddexp(total_HT, sinks_H.to(total_HT.dtype)[:, None], out=total_HT)

    if first_THE.is_cuda and accumulate_dtype(dtype) == torch.float32:
        from forkpoint.ops.attention.triton_sums import sum_parts

        lses = [part.lse_HT.contiguous() for part in parts]
        pieces = [(part.q_begin, part.o_THE) for part in parts]
        o_THE = sum_parts(
            pieces, dtype, lses_HT=lses, total_HT=total_HT, alone_is_whole=sinks_H is None
        )
        return o_THE, total_HT

    out_THE = None
    for begin, o_THE, part_HT in parts:
        queries = slice(begin, begin + len(o_THE))
        weight_TH1 = (part_HT - total_HT[:, queries]).exp_().T[:, :, None]
        if out_THE is None:
            out_THE = o_THE.to(accumulate_dtype(dtype)) * weight_TH1
        else:
            out_THE[queries].addcmul_(o_THE.to(out_THE.dtype), weight_TH1)
    assert out_THE is not None
    return dense(out_THE, dtype), total_HT
