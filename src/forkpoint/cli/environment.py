"""Versions and devices of this installation."""

import platform
from importlib import metadata
from typing import Any

import torch

from forkpoint import __version__

PACKAGES = ("torch", "transformers", "numpy", "triton", "flash-attn-4", "flash-linear-attention")


def versions() -> dict[str, str | None]:
    """Versions of what decides the results and the speed; None for what is not installed."""
    found: dict[str, str | None] = {"forkpoint": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return {**found, "cuda": torch.version.cuda}


def devices() -> list[dict[str, Any]]:
    """The CPU and every CUDA device."""
    cpu = {"device": "cpu", "name": platform.machine(), "threads": torch.get_num_threads()}
    found: list[dict[str, Any]] = [cpu]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
            }
        )
    return found
