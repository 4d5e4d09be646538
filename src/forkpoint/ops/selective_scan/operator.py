"""The selective scan of a microbatch: segments level by level, by the kernel that is named."""

from contextlib import nullcontext

import torch
from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.ops.recurrence import StateTable, over_levels
from forkpoint.ops.selective_scan import chunked, reference

SCAN_KERNELS = {"chunked": chunked.scan, "reference": reference.scan}
"""Both run on any device, in any floating dtype; "auto" takes the first."""


def selective_scan(
    x_TGE: Tensor,
    a_TG: Tensor,
    b_THD: Tensor,
    c_THD: Tensor,
    *,
    table: StateTable,
    initial_SGED: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Outputs of every token of a microbatch, and the states that other microbatches start from.

    Args:
        x_TGE: [T, G, E] values, multiplied by their time steps.
        a_TG: [T, G] log of the decay, at most 0.
        b_THD, c_THD: [T, H, D] what values are written and read with; G is a multiple of H.
        table: the microbatch's segments.
        initial_SGED: [S, G, E, D] float32 (float64), what the S segments of the first level start
            from; None for zeros.
        kernel: one of SCAN_KERNELS by name, or "auto".

    Returns:
        [T, G, E] and [K, G, E, D], both float32 (float64); the latter in the order of
        `table.kept_index`, or None if no other microbatch starts from any.

    Raises UnsupportedError for a kernel that is none.
    """
    if kernel not in ("auto", *SCAN_KERNELS):
        known = ", ".join(map(repr, SCAN_KERNELS))
        raise UnsupportedError(
            f"There is no selective-scan kernel {kernel!r}; there are 'auto', {known}. Name one of "
            "these as recurrence_kernel, or leave the choice to 'auto'."
        )
    assert x_TGE.shape[:2] == a_TG.shape and b_THD.shape == c_THD.shape
    assert x_TGE.shape[1] % b_THD.shape[1] == 0
    assert initial_SGED is None or initial_SGED.dtype == accumulate_dtype(x_TGE.dtype)
    scan = SCAN_KERNELS["chunked" if kernel == "auto" else kernel]
    kind = x_TGE.device.type
    plain = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else None
    with plain or nullcontext():
        return over_levels(scan, (x_TGE, a_TG, b_THD, c_THD), table, initial_SGED)
