"""The dtype in which operators sum."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exps, states, sums over launches and boundary gradients.

    float32, and float64 for float64.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Disable autocast, which would round float32 sums and products within operators to 16 bits."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
