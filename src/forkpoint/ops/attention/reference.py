"""The reference kernel: softmax attention in plain torch, for any device and dtype.

It is slow. It computes and returns float32 (float64 for float64).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from forkpoint.ops.attention.kernel import BackwardInputs, Gradients, Kernel, Options
from forkpoint.ops.attention.table import Launch
from forkpoint.ops.dtypes import accumulate_dtype

MOST_SCORES = 1 << 28
"""Scores that exist at once, unless one query has more. Sequences with more are computed by blocks
of queries."""


def forward(
    q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, launch: Launch, options: Options
) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(q_THD.dtype)
    heads, groups = q_THD.shape[1], k_TKD.shape[1]
    o_THE = q_THD.new_empty(len(q_THD), heads, v_TKE.shape[2], dtype=dtype)
    lse_HT = q_THD.new_empty(heads, len(q_THD), dtype=dtype)
    for q0, q1, k0, k1 in _blocks(launch, heads):
        q_KND, k_KND, v_KNE = (
            _by_group(x, groups, dtype) for x in (q_THD[q0:q1], k_TKD[k0:k1], v_TKE[k0:k1])
        )
        s_KNM, _ = _scores(q_KND, k_KND, q1 - q0, launch.causal, options)
        lse_KN = s_KNM.logsumexp(-1)
        p_KNM = (s_KNM - lse_KN[:, :, None]).exp_()
        o_THE[q0:q1] = _by_head(p_KNM @ v_KNE, heads)
        lse_HT[:, q0:q1] = lse_KN.view(heads, -1)
    return o_THE, lse_HT


def backward(inputs: BackwardInputs, launch: Launch, options: Options) -> Gradients:
    do_THE, q_THD, k_TKD, v_TKE, o_THE, lse_HT = inputs
    dtype = accumulate_dtype(q_THD.dtype)
    heads, groups = q_THD.shape[1], k_TKD.shape[1]
    dq_THD, dk_TKD, dv_TKE = (torch.zeros_like(x, dtype=dtype) for x in (q_THD, k_TKD, v_TKE))
    for q0, q1, k0, k1 in _blocks(launch, heads):
        q_KND, o_KNE, do_KNE, k_KND, v_KNE = (
            _by_group(x, groups, dtype)
            for x in (q_THD[q0:q1], o_THE[q0:q1], do_THE[q0:q1], k_TKD[k0:k1], v_TKE[k0:k1])
        )
        s_KNM, slope_KNM = _scores(q_KND, k_KND, q1 - q0, launch.causal, options)
        p_KNM = (s_KNM - lse_HT[:, q0:q1].reshape(groups, -1, 1)).exp_()
        delta_KN1 = (do_KNE * o_KNE).sum(-1, keepdim=True)
        ds_KNM = p_KNM * (do_KNE @ v_KNE.mT - delta_KN1)
        if slope_KNM is not None:
            ds_KNM *= slope_KNM
        dq_THD[q0:q1] = _by_head(ds_KNM @ k_KND * options.scale, heads)
        dk_TKD[k0:k1] += (ds_KNM.mT @ q_KND * options.scale).transpose(0, 1)
        dv_TKE[k0:k1] += (p_KNM.mT @ do_KNE).transpose(0, 1)
    return dq_THD, dk_TKD, dv_TKE


def _blocks(launch: Launch, heads: int) -> Iterator[tuple[int, int, int, int]]:
    """The sequences of a launch, as `Launch.sequences`, or blocks of their queries.

    The last query of a block is at its last key, as in a sequence.
    """
    for q0, q1, k0, k1 in launch.sequences():
        most = max(1, MOST_SCORES // (heads * (k1 - k0)))
        for begin in range(q0, q1, most):
            end = min(begin + most, q1)
            yield begin, end, k0, k1 - (q1 - end) if launch.causal else k1


def _scores(
    q_KND: Tensor, k_KMD: Tensor, queries: int, causal: bool, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Scores [K, N, M], -inf where masked, and the derivative of the softcap, if any."""
    s_KNM = q_KND @ k_KMD.mT * options.scale
    slope_KNM = None
    if options.softcap:
        tanh_KNM = torch.tanh(s_KNM / options.softcap)
        s_KNM, slope_KNM = tanh_KNM * options.softcap, 1 - tanh_KNM * tanh_KNM
    if causal:
        keys = k_KMD.shape[1]
        seen_NM = torch.ones(queries, keys, dtype=torch.bool, device=q_KND.device)
        seen_NM = seen_NM.tril(keys - queries)
        if options.window:
            seen_NM = seen_NM.triu(keys - queries - options.window + 1)
        # The rows of a group are the queries of its heads, one head after the other.
        s_KNM.view(len(s_KNM), -1, queries, keys).masked_fill_(~seen_NM, -torch.inf)
    return s_KNM, slope_KNM


def _by_group(x_THD: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[T, H, D] -> [K, H/K * T, D]: stacks query heads that share a key-value head."""
    x_HTD = x_THD.to(dtype).transpose(0, 1)
    return x_HTD.reshape(groups, -1, x_HTD.shape[2])


def _by_head(x_KND: Tensor, heads: int) -> Tensor:
    """The inverse of `_by_group`, without the change of dtype."""
    return x_KND.reshape(heads, -1, x_KND.shape[2]).transpose(0, 1)


KERNEL = Kernel(
    name="reference",
    forward=forward,
    backward=backward,
    device_types=None,
    dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    softcap=True,
    window=True,
    causal_offset=True,
    ragged=True,
    deterministic=True,
)
