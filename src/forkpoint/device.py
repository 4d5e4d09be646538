"""Names of devices, versions of what runs on them, and copies of tensors and arrays to them."""

import platform
from importlib import metadata

import numpy as np
import torch
from torch import Tensor

PACKAGES = (
    *("forkpoint", "torch", "transformers", "numpy", "triton"),
    *("flash-attn-4", "flash-linear-attention", "fla-core", "tilelang"),
)


def device_name(device: torch.device) -> str:
    """A GPU's model; of a CPU its architecture and how many threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine() or 'cpu'}, {threads} thread{'s' * (threads > 1)}"


def versions() -> dict[str, str | None]:
    """Versions of what decides the results and the speed; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    # That of the package leaves out for which CUDA torch was built, or that it was for none.
    found["torch"] = str(torch.__version__)
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {**found, "cuda": torch.version.cuda, "cudnn": None if cudnn is None else str(cudnn)}


def measured_versions() -> dict[str, str]:
    """The same of what is installed."""
    return {name: version for name, version in versions().items() if version is not None}


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on the device, by an asynchronous copy where that is another than the CPU."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def on_device(values: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The array as a tensor there, of its own dtype or another; the host waits for no copy.

    A copy from memory that is not pinned would have it wait for all that the device has to do.
    """
    host = torch.as_tensor(np.ascontiguousarray(values), device="cpu")
    host = host if dtype is None else host.to(dtype)
    return to_device(host, device) if host.numel() else torch.empty_like(host, device=device)
