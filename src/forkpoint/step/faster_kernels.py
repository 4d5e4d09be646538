"""A line of the log, once in a process, that names a package whose kernels are faster."""

import logging

import torch

from forkpoint.ops.attention import fa4
from forkpoint.ops.attention.table import LONG_TOKENS
from forkpoint.plan import Plan

_log = logging.getLogger("forkpoint")
_is_settled = False
"""Whether this process has said it, or has the package, which takes 0.5 ms to look for."""

SAID = (
    "attention runs on torch's kernels, and FlashAttention-4 is faster on this GPU for segments as "
    "long as this step's (%d tokens): pip install 'forkpoint[fa4]'. This is said once."
)


def note_faster_kernels(plan: Plan, device: torch.device, kernel: str) -> None:
    """Log that FlashAttention-4 is missing, where it could serve this GPU and long segments.

    kernel: as asked for in Config.
    """
    global _is_settled
    if _is_settled or device.type != "cuda" or kernel != "auto":
        return
    longest = int(plan.forest.length.max(initial=0))
    if not plan.shape or plan.shape.dtype_bytes != 2 or longest < LONG_TOKENS:
        return
    major, _ = torch.cuda.get_device_capability(device)
    if major in fa4.CAPABILITIES:
        _is_settled = True
        if not fa4.is_installed():
            _log.warning(SAID, longest)
