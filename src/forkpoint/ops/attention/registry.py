"""The kernels there are, and which of them serves."""

from functools import lru_cache

import torch

from forkpoint.errors import UnsupportedError
from forkpoint.ops.attention import cpu_flash, cudnn, fa2, fa4, reference
from forkpoint.ops.attention.kernel import Kernel
from forkpoint.ops.attention.table import Launch
from forkpoint.ops.choice import AUTO, able_kernels, choose_kernel

KERNELS: tuple[Kernel, ...] = (
    fa4.KERNEL,
    cudnn.KERNEL,
    fa2.KERNEL,
    cpu_flash.KERNEL,
    reference.KERNEL,
)
"""Fastest first: "auto" takes the first that can serve. Each serves only what its record says."""


def launch_kernel(
    name: str,
    launch: Launch,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    softcap: float,
    window: int,
    deterministic: bool,
    grouped: bool = False,
) -> Kernel:
    """The kernel for one launch: partial results merge whatever kernels they come from.

    Raises UnsupportedError as `select_kernel`, and where a named kernel cannot serve the launch.
    """
    asked = (device, dtype, head_dim, value_dim, softcap, window, deterministic, grouped)
    if name != AUTO:
        chosen = select_kernel(name, *asked)
        refusal = chosen.launch_refusal(launch)
        if refusal is not None:
            raise UnsupportedError(f"Attention kernel {name!r} cannot serve: {refusal}.")
        return chosen
    refusals: list[str] = []
    able = [k for k in _able(*asked) if _serves(k, launch, refusals)]
    pairs = launch.max_q * launch.max_k * launch.count
    for chosen in [k for k in able if pairs >= k.auto_pairs] or able:
        return chosen
    if not refusals:
        return select_kernel(name, *asked)
    raise UnsupportedError(f"No attention kernel can serve a launch: {'; '.join(refusals)}.")


def _serves(kernel: Kernel, launch: Launch, refusals: list[str]) -> bool:
    refusal = kernel.launch_refusal(launch)
    if refusal is not None:
        refusals.append(f"{kernel.name}: {refusal}")
    return refusal is None


@lru_cache(maxsize=1024)
def _able(*asked) -> tuple[Kernel, ...]:
    return able_kernels(KERNELS, asked)


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
    grouped: bool = False,
) -> Kernel:
    """The kernel of that name, or for "auto" the first of KERNELS that can serve.

    Raises UnsupportedError for a name that is none, for a named kernel that cannot serve, and where
    no kernel can; the message has the reason and what can serve instead.
    """
    asked = (device, dtype, head_dim, value_dim, softcap, window, deterministic, grouped)
    return choose_kernel("attention", KERNELS, name, asked)


def forget_choices() -> None:
    """Forget the choices that are kept; call this where KERNELS has changed."""
    _able.cache_clear()
    select_kernel.cache_clear()
