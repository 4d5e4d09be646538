"""Recurrences one token after the other, sequence by sequence: the kernels are tested against them.

The gated delta rule, with q and k of length one (Yang et al., Gated Delta Networks, arXiv
2412.06464, equation 10):

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T
    o_t = S_t^T q_t / sqrt(D)

and that of Mamba-2 (`forkpoint.ops.selective_scan`).
"""

from itertools import pairwise

import torch
from torch import Tensor

from forkpoint.ops.delta_rule.kernel import by_value_head, normalized
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.ops.recurrence import Sequences


def delta_rule(
    q_THD: Tensor,
    k_THD: Tensor,
    v_TGE: Tensor,
    g_TG: Tensor,
    beta_TG: Tensor,
    initial_SGDE: Tensor | None,
    sequences: Sequences,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    dtype = accumulate_dtype(v_TGE.dtype)
    heads, value_dim = v_TGE.shape[1:]
    key_dim = q_THD.shape[2]
    q_TGD, k_TGD = (by_value_head(normalized(x.to(dtype)), heads) for x in (q_THD, k_THD))
    v, g, beta = v_TGE.to(dtype), g_TG.to(dtype), beta_TG.to(dtype)
    outputs, states = [], []
    for i, (begin, end) in enumerate(pairwise(sequences.cu_cpu.tolist())):
        state_GDE = v.new_zeros(heads, key_dim, value_dim)
        if initial_SGDE is not None:
            state_GDE = initial_SGDE[i].to(dtype)
        for t in range(begin, end):
            state_GDE = state_GDE * g[t].exp()[:, None, None]
            known_GE = torch.einsum("gde,gd->ge", state_GDE, k_TGD[t])
            delta_GE = (v[t] - known_GE) * beta[t][:, None]
            state_GDE = state_GDE + k_TGD[t][:, :, None] * delta_GE[:, None, :]
            outputs.append(torch.einsum("gde,gd->ge", state_GDE, q_TGD[t]) * key_dim**-0.5)
        states.append(state_GDE)
    return torch.stack(outputs).to(v_TGE.dtype), torch.stack(states) if final else None


def mamba2(
    x_TGE: Tensor,
    a_TG: Tensor,
    b_THD: Tensor,
    c_THD: Tensor,
    initial_SGED: Tensor | None,
    sequences: Sequences,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    """One token after the other, sequence by sequence, as one writes the recurrence down."""
    dtype = accumulate_dtype(x_TGE.dtype)
    heads = x_TGE.shape[1]
    x, a = x_TGE.to(dtype), a_TG.to(dtype)
    b_TGD, c_TGD = (
        y.to(dtype).repeat_interleave(heads // y.shape[1], dim=1) for y in (b_THD, c_THD)
    )
    outputs, states = [], []
    for i, (begin, end) in enumerate(pairwise(sequences.cu_cpu.tolist())):
        state_GED = x.new_zeros(heads, x.shape[2], b_TGD.shape[2])
        if initial_SGED is not None:
            state_GED = initial_SGED[i].to(dtype)
        for t in range(begin, end):
            write_GED = x[t][:, :, None] * b_TGD[t][:, None, :]
            state_GED = state_GED * a[t].exp()[:, None, None] + write_GED
            outputs.append(torch.einsum("ged,gd->ge", state_GED, c_TGD[t]))
        states.append(state_GED)
    return torch.stack(outputs), torch.stack(states) if final else None
