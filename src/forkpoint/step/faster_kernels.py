"""Logs once in a process that a package with faster kernels is missing."""

import logging
from dataclasses import replace

import torch

from forkpoint.ops.attention import fa4
from forkpoint.plan import Plan

_log = logging.getLogger("forkpoint")
_is_settled = False
"""Whether this process has logged it or has the package. Looking for the package takes 0.5 ms."""

MOST_DIM = 128
"""Largest head dim for which it has been measured to be faster."""
LEAST_SHARE = 0.05
"""Least share of attention in a step's FLOPs. With less, as for prompts of 512 tokens with
responses of 256, it has been measured to be slower than torch's kernels."""
SAID = (
    "attention, %.0f%% of this step's FLOPs, runs on torch's kernels. FlashAttention-4 is faster "
    "on this GPU: pip install 'forkpoint[fa4]'. This message is logged once."
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
    work = plan.shared
    products = replace(work, pairs=dict.fromkeys(work.pairs, 0)).step_flops(shape)
    share = 1 - products / max(1.0, work.step_flops(shape))
    if major in fa4.CAPABILITIES and share >= LEAST_SHARE:
        _is_settled = True
        if not fa4.is_installed():
            _log.warning(SAID, 100 * share)
