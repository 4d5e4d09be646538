"""The dtype in which operators sum."""

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse, of states, of sums over launches and of boundary gradients.

    float32, and float64 for float64.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32
