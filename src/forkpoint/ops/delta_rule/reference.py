"""The reference kernel: any device and dtype, the recurrence as one writes it down.

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T
    o_t = S_t^T q_t / sqrt(D)

with q and k of length one (Yang et al., Gated Delta Networks, arXiv 2412.06464, equation 10). One
token after the other, sequence by sequence; every other kernel is tested against it.
"""

import torch
from torch import Tensor

from forkpoint.ops.delta_rule.kernel import DeltaKernel, by_value_head, normalized
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.ops.recurrence import Sequences


def scan(
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
    for i, (begin, end) in enumerate(sequences.spans()):
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


KERNEL = DeltaKernel(
    name="reference",
    scan=scan,
    device_types=None,
    dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    deterministic=True,
)
