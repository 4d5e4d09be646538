"""Names of devices in files that are looked up by them, and copies of arrays to a device."""

import platform

import numpy as np
import torch
from torch import Tensor

from forkpoint.ops.attention.table import to_device


def device_name(device: torch.device) -> str:
    """A GPU's model; of a CPU its architecture and how many threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine() or 'cpu'}, {threads} thread{'s' * (threads > 1)}"


def on_device(values: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The array as a tensor there, of its own dtype or another; the host waits for no copy.

    A copy from memory that is not pinned would have it wait for all that the device has to do.
    """
    host = torch.as_tensor(np.ascontiguousarray(values), device="cpu")
    host = host if dtype is None else host.to(dtype)
    return to_device(host, device) if host.numel() else torch.empty_like(host, device=device)
