"""Logs once in a process that a package with faster kernels is missing."""

import logging
from dataclasses import replace

import torch

from forkpoint.ops.attention import fa4
from forkpoint.plan import Plan
from forkpoint.plan.pricing.meters import full_launches
from forkpoint.tree import LONG_TOKENS

_log = logging.getLogger("forkpoint")
_is_settled = False
"""Whether this process has logged it, has the package, or has a GPU that cannot use it. A
prediction takes up to 38 ms."""

TFLOPS = {"products": 620.0, "fa2": 261.0, "padded": 464.0, "fa4": 560.0}
"""Rates of an H100 in bfloat16, forward and backward: matrix products, and causal attention of
8,506 tokens with 16 query heads and 8 key-value heads of 128, by each kernel."""
MOST_DIM = 128
"""Largest head dim that these rates stand for."""
LEAST_GAIN = 1.02
SAID = (
    "attention runs on torch's kernels. With FlashAttention-4 this step is predicted to be %.2f "
    "times as fast, by rates of an H100: pip install 'forkpoint[fa4]'. This message is logged once."
)


def note_faster_kernels(plan: Plan, device: torch.device, kernel: str) -> None:
    """Log that FlashAttention-4 is missing, if it could serve this GPU.

    kernel: the kernel in Config.
    """
    global _is_settled
    shape = plan.shape
    if _is_settled or device.type != "cuda" or kernel != "auto":
        return
    if not shape or shape.dtype_bytes != 2 or max(shape.head_dim, shape.value_dim) > MOST_DIM:
        return
    major, _ = torch.cuda.get_device_capability(device)
    if major not in fa4.CAPABILITIES:
        _is_settled = True
    elif (gain := predicted_gain(plan)) >= LEAST_GAIN:
        _is_settled = True
        if not fa4.is_installed():
            _log.warning(SAID, gain)


def predicted_gain(plan: Plan) -> float:
    """The time of a step's products and attention with torch's kernels over that with
    FlashAttention-4; where it is below LEAST_GAIN it may be less."""
    shape, work = plan.shape, plan.shared
    assert shape is not None, "a plan of a model"
    whole = work.step_flops(shape)
    products = replace(work, pairs=dict.fromkeys(work.pairs, 0)).step_flops(shape)
    attention = whole - products
    both, after = products / TFLOPS["products"], attention / TFLOPS["fa4"]
    at_most = both + attention / TFLOPS["fa2"]
    if at_most < LEAST_GAIN * (both + after):
        return float(at_most / (both + after)) if whole else 1.0
    on_cudnn = every = 0
    for microbatch in plan.microbatches:
        for launch in full_launches(plan, microbatch):
            for (kind, length), pairs in launch.pairs.items():
                every += pairs
                on_cudnn += pairs * (kind == "wide" or (kind == "causal" and length >= LONG_TOKENS))
    padded = attention * on_cudnn / max(1, every)
    before = padded / TFLOPS["padded"] + (attention - padded) / TFLOPS["fa2"]
    return float((both + before) / (both + after))
