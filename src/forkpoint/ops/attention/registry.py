"""The kernels there are, and which of them serves."""

from functools import lru_cache

import torch

from forkpoint.errors import UnsupportedError
from forkpoint.ops.attention import cpu_flash, reference
from forkpoint.ops.attention.kernel import Kernel

KERNELS: tuple[Kernel, ...] = (cpu_flash.KERNEL, reference.KERNEL)
"""Fastest first: "auto" takes the first that can serve. Each serves only what its record says."""


@lru_cache(maxsize=1024)
def select_kernel(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    softcap: float,
    window: int,
    deterministic: bool,
) -> Kernel:
    """The kernel of that name, or for "auto" the first of KERNELS that can serve.

    Raises UnsupportedError for a name that is none, for a named kernel that cannot serve, and where
    no kernel can; the message has the reason and what can serve instead.
    """
    refusals = {
        kernel.name: kernel.refusal(
            device, dtype, head_dim, value_dim, softcap, window, deterministic
        )
        for kernel in KERNELS
    }
    able = [kernel for kernel in KERNELS if refusals[kernel.name] is None]
    if name == "auto" and able:
        return able[0]
    for kernel in able:
        if kernel.name == name:
            return kernel
    can_serve = ", ".join(repr(kernel.name) for kernel in able) or "none"
    if name == "auto":
        reasons = "; ".join(f"{kernel}: {why}" for kernel, why in refusals.items())
        raise UnsupportedError(
            f"No attention kernel can serve {dtype} on {device} with head dims {head_dim} and "
            f"{value_dim}. {reasons}."
        )
    if name not in refusals:
        known = ", ".join(repr(kernel.name) for kernel in KERNELS)
        raise UnsupportedError(
            f"There is no attention kernel {name!r}; there are 'auto', {known}. "
            f"Able to serve here: {can_serve}."
        )
    raise UnsupportedError(
        f"Attention kernel {name!r} cannot serve: {refusals[name]}. "
        f"Able to serve here: {can_serve}. Name one of these, or leave the choice to 'auto'."
    )
