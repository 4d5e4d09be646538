"""Which kind of work a step's device time goes to, by the names of its kernels."""

from collections.abc import Callable

import torch

from benchmarks.kernel_kinds import by_kind

KINDS = {
    "delta rule": r"chunk_|gated_delta|delta_rule|recompute_w_u|wy_repr|solve_tril|l2norm|tilelang"
    # What tilelang calls all of its kernels.
    r"|^(main_)?kernel(_kernel)?$",
    "convolution": r"conv_|convolution|conv1d",
    "attention": r"flash|fmha|sdpa|attention|attn|sum_parts",
    "matmul": r"gemm|cutlass|cublas|nvjet|xmma|s16816|wgmma",
}
COMPILED = {"convolution": r"constant_pad_nd", "matmul": r"^triton_(tem|mm)"}
"""The same for kernels of compiled blocks, whose names list what was fused. Nothing there is padded
but the inputs of convolutions. What is fused with one (its activation) counts as convolution, and a
list that is cut short may leave it out."""


def device_ms(step: Callable[[], object]) -> dict[str, float]:
    """Device time of one call, in milliseconds for each kind of work."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    spent = by_kind(profile.key_averages(), KINDS, compiled=COMPILED)
    return {kind: found.us / 1e3 for kind, found in spent.items()}
