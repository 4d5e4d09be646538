"""The reference kernel: any device and dtype, the recurrence as one writes it down.

    S_t = exp(a_t) S_{t-1} + x_t b_t^T,   y_t = S_t c_t

(Dao and Gu, Transformers are SSMs, arXiv 2405.21060, equation 1 with a scalar decay; x is already
multiplied by its time step). One token after the other, sequence by sequence.
"""

import torch
from torch import Tensor

from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.ops.recurrence import Sequences


def scan(
    x_TGE: Tensor,
    a_TG: Tensor,
    b_THD: Tensor,
    c_THD: Tensor,
    initial_SGED: Tensor | None,
    sequences: Sequences,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    dtype = accumulate_dtype(x_TGE.dtype)
    heads = x_TGE.shape[1]
    x, a = x_TGE.to(dtype), a_TG.to(dtype)
    b_TGD, c_TGD = (
        y.to(dtype).repeat_interleave(heads // y.shape[1], dim=1) for y in (b_THD, c_THD)
    )
    outputs, states = [], []
    for i, (begin, end) in enumerate(sequences.spans()):
        state_GED = x.new_zeros(heads, x.shape[2], b_TGD.shape[2])
        if initial_SGED is not None:
            state_GED = initial_SGED[i].to(dtype)
        for t in range(begin, end):
            write_GED = x[t][:, :, None] * b_TGD[t][:, None, :]
            state_GED = state_GED * a[t].exp()[:, None, None] + write_GED
            outputs.append(torch.einsum("ged,gd->ge", state_GED, c_TGD[t]))
        states.append(state_GED)
    return torch.stack(outputs), torch.stack(states) if final else None
