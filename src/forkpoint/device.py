"""Names of devices, versions of software, and copies of tensors and arrays to devices."""

import platform
import time
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor

PACKAGES = (
    *("forkpoint", "torch", "transformers", "numpy", "triton"),
    *("flash-attn-4", "flash-linear-attention", "fla-core", "tilelang"),
)


def device_name(device: torch.device) -> str:
    """Model of a GPU, or architecture of a CPU with the number of torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine() or 'cpu'}, {threads} thread{'s' * (threads > 1)}"


def usable_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that torch holds or may take, within its fraction of the device."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return min(free + reserved, int(fraction * total))


def versions() -> dict[str, str | None]:
    """Versions of the software that determines results and speed; None for packages that are not
    installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    # torch.__version__ names the CUDA version of the build, which the version of the package omits.
    found["torch"] = str(torch.__version__)
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {**found, "cuda": torch.version.cuda, "cudnn": None if cudnn is None else str(cudnn)}


def measured_versions() -> dict[str, str]:
    """Versions of installed packages."""
    return {name: version for name, version in versions().items() if version is not None}


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device, asynchronously if the device is not the CPU."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def on_device(
    values: np.ndarray, device: torch.device | str, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy an array to a device as a tensor, optionally in another dtype, without waiting for the
    copy.

    A copy from memory that is not pinned would wait for all work of the device.
    """
    host = torch.as_tensor(np.ascontiguousarray(values), device="cpu")
    host = host if dtype is None else host.to(dtype)
    return to_device(host, device) if host.numel() else torch.empty_like(host, device=device)


def mark(device: torch.device) -> float | torch.cuda.Event:
    """A moment of a device's work, for `between_ms`. Does not wait for the device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_ms(begin: Any, end: Any) -> float:
    """Milliseconds between two marks. Waits for the second one."""
    if isinstance(end, float):
        return (end - begin) * 1e3
    end.synchronize()
    return begin.elapsed_time(end)
