"""Which kind of work a step's device time goes to, by the names of its kernels."""

import re
from collections.abc import Callable

import torch

KINDS = {
    "delta_rule": r"chunk_|gated_delta|delta_rule|recompute_w_u|wy_repr|solve_tril|l2norm|tilelang",
    "convolution": r"conv",
    "attention": r"flash|fmha|sdpa|attention|attn|sum_parts",
    "matmul": r"gemm|cutlass|cublas|nvjet|xmma|s16816|wgmma",
}
"""A kernel belongs to the first kind whose pattern is in its name; what is left is "rest"."""


def kind_of(kernel: str) -> str:
    """The kind of work of a kernel by that name."""
    name = kernel.lower()
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "rest")


def time_shares(step: Callable[[], object]) -> dict[str, float]:
    """Shares of the device time of one call, which add up to 1."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    spent = dict.fromkeys((*KINDS, "rest"), 0.0)
    for event in profile.key_averages():
        spent[kind_of(event.key)] += event.self_device_time_total
    total = sum(spent.values())
    return {kind: time / total for kind, time in spent.items()}
