"""The dtype in which operators sum."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse, of states, of sums over launches and of boundary gradients.

    float32, and float64 for float64.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Autocast reaches into operators: here it would round float32 sums and products to 16 bit."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
