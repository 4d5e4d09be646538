"""Which kind of work a step's device time goes to, by the names of its kernels."""

import re
from collections.abc import Callable

import torch

KINDS = {
    "delta rule": r"chunk_|gated_delta|delta_rule|recompute_w_u|wy_repr|solve_tril|l2norm|tilelang"
    # What tilelang calls all of its kernels.
    r"|^(main_)?kernel(_kernel)?$",
    "convolution": r"conv_|convolution|conv1d",
    "attention": r"flash|fmha|sdpa|attention|attn|sum_parts",
    "matmul": r"gemm|cutlass|cublas|nvjet|xmma|s16816|wgmma",
}
"""A kernel belongs to the first kind whose pattern is in its name; what is left is "rest"."""
COMPILED = {"convolution": r"constant_pad_nd", "matmul": r"^triton_(tem|mm)"}
"""The same for kernels of compiled blocks, whose names list what was fused. Nothing there is padded
but the inputs of convolutions. What is fused with one (its activation) counts as convolution, and a
list that is cut short may leave it out."""


def kind_of(kernel: str) -> str:
    """The kind of work of a kernel by that name."""
    name = kernel.lower()
    kinds = COMPILED if name.startswith("triton_") else KINDS
    return next((kind for kind, pattern in kinds.items() if re.search(pattern, name)), "rest")


def device_ms(step: Callable[[], object]) -> dict[str, float]:
    """Device time of one call, in milliseconds for each kind of work."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    spent = dict.fromkeys((*KINDS, "rest"), 0.0)
    for event in profile.key_averages():
        spent[kind_of(event.key)] += event.self_device_time_total / 1e3
    return spent
