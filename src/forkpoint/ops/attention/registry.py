"""The kernels there are, and which of them serves."""

from functools import lru_cache

from forkpoint.errors import UnsupportedError
from forkpoint.ops.attention import cpu_flash, cudnn, fa2, fa4, padded, reference
from forkpoint.ops.attention.kernel import Asked, Kernel
from forkpoint.ops.attention.table import Launch
from forkpoint.ops.choice import AUTO, choose_kernel

KERNELS: tuple[Kernel, ...] = (
    fa4.KERNEL,
    padded.KERNEL,
    cudnn.KERNEL,
    fa2.KERNEL,
    cpu_flash.KERNEL,
    reference.KERNEL,
)
"""Fastest first: "auto" takes the first that can serve. Each serves only what its record says."""


def launch_kernel(name: str, launch: Launch, asked: Asked) -> Kernel:
    """The kernel for one launch: partial results of different kernels merge.

    Raises UnsupportedError as `select_kernel`, and where a named kernel cannot serve the launch.
    """
    able = _able(asked) if name == AUTO else (select_kernel(name, asked),)
    refusals = {kernel.name: kernel.launch_refusal(launch, asked) for kernel in able}
    able = [kernel for kernel in able if refusals[kernel.name] is None]
    pairs = launch.max_q * launch.max_k * launch.count
    for kernel in able:
        if name != AUTO or pairs >= kernel.auto_pairs:
            return kernel
    if able:
        return able[0]
    if not refusals:
        return select_kernel(name, asked)
    if name != AUTO:
        raise UnsupportedError(
            f"Attention kernel {name!r} cannot serve: {refusals[name]}. Use 'auto'."
        )
    reasons = "; ".join(f"{kernel}: {why}" for kernel, why in refusals.items())
    raise UnsupportedError(
        f"No attention kernel can serve a launch: {reasons}. Use another dtype or device."
    )


@lru_cache(maxsize=1024)
def _able(asked: Asked) -> tuple[Kernel, ...]:
    return tuple(kernel for kernel in KERNELS if kernel.refusal(asked) is None)


@lru_cache(maxsize=1024)
def select_kernel(name: str, asked: Asked) -> Kernel:
    """The kernel of that name, or for "auto" the first of KERNELS that can serve.

    Raises UnsupportedError for a name that is none, for a named kernel that cannot serve, and where
    no kernel can; the message has the reason and what can serve instead.
    """
    return choose_kernel("attention", KERNELS, name, asked)


def forget_choices() -> None:
    """Forget the choices that are kept; call this where KERNELS has changed."""
    _able.cache_clear()
    select_kernel.cache_clear()
