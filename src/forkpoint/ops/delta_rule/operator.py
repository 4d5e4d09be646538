"""The gated delta rule of a microbatch, level by level."""

import logging
from functools import lru_cache

import torch
from torch import Tensor

from forkpoint.ops.choice import AUTO, Asked, choose_kernel
from forkpoint.ops.delta_rule import chunked, fla
from forkpoint.ops.delta_rule.kernel import DeltaKernel, is_large
from forkpoint.ops.dtypes import accumulate_dtype, without_autocast
from forkpoint.ops.recurrence import StateTable, over_levels

DELTA_KERNELS: tuple[DeltaKernel, ...] = (fla.KERNEL, chunked.KERNEL)
"""Kernels, fastest first: "auto" takes the first that can serve."""

_log = logging.getLogger("forkpoint")


@lru_cache(maxsize=1024)
def select_delta_kernel(name: str, asked: Asked) -> DeltaKernel:
    """The kernel with this name; for "auto", the first of DELTA_KERNELS that can serve.

    Raises UnsupportedError for an unknown name, and if the named kernel cannot serve. The message
    has the reason and usable kernels.
    """
    chosen = choose_kernel("delta-rule", DELTA_KERNELS, name, asked)
    fastest = DELTA_KERNELS[0]
    is_slower = chosen is not fastest and asked.dtype in fastest.dtypes
    if name == AUTO and asked.device.type == "cuda" and is_slower:
        # The user may only need to install a package. Choices are cached, so this is logged once
        # for each kind of call.
        _log.warning(
            "gated delta rule: %r runs instead of the faster %r, because %s.",
            chosen.name,
            fastest.name,
            fastest.refusal(asked),
        )
    return chosen


def gated_delta_rule(
    q_THD: Tensor,
    k_THD: Tensor,
    v_TGE: Tensor,
    g_TG: Tensor,
    beta_TG: Tensor,
    *,
    table: StateTable,
    initial_SGDE: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Outputs of every token of a microbatch, and the states that other microbatches start from.

    Args:
        q_THD, k_THD: [T, H, D]; both are normalized here, and q is divided by the root of D.
        v_TGE: [T, G, E] in the same dtype; G is a multiple of H.
        g_TG: [T, G] log of the decay, at most 0, float32 (float64 for float64).
        beta_TG: [T, G] fraction of a value that is written, from 0 to 1.
        initial_SGDE: [S, G, D, E] float32 (float64), initial states of the S segments of the first
            level; None for zeros.
        kernel: one of DELTA_KERNELS by name, or "auto".

    Returns:
        [T, G, E] in v's dtype, and [K, G, D, E] float32 (float64) in the order of
        `table.kept_index`, or None if no other microbatch starts from any.

    Raises UnsupportedError if no kernel, or not the named one, can serve.
    """
    assert q_THD.shape == k_THD.shape and v_TGE.shape[:2] == g_TG.shape == beta_TG.shape
    assert v_TGE.shape[1] % q_THD.shape[1] == 0 and q_THD.dtype == v_TGE.dtype
    assert initial_SGDE is None or initial_SGDE.dtype == accumulate_dtype(v_TGE.dtype)
    asked = Asked(
        *(v_TGE.device, v_TGE.dtype, q_THD.shape[2], v_TGE.shape[2]),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        is_large=is_large(v_TGE, q_THD.shape[2], sum(x.sequences.count for x in table.levels)),
    )
    chosen = select_delta_kernel(kernel, asked)
    inputs = (q_THD, k_THD, v_TGE, g_TG, beta_TG)
    with without_autocast(v_TGE):
        if chosen.scan_levels is not None and len(table.levels) > 1:
            return chosen.scan_levels(inputs, table, initial_SGDE)
        return over_levels(chosen.scan, inputs, table, initial_SGDE)
