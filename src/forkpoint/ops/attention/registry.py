"""The attention kernels, and the choice of one for a launch."""

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
"""Kernels, fastest first: "auto" takes the first that can serve."""


def launch_kernel(name: str, launch: Launch, asked: Asked) -> Kernel:
    """The kernel for one launch. Partial results of different kernels can be merged.

    Raises UnsupportedError as `select_kernel`, and if a named kernel cannot serve the launch.
    """
    if name == AUTO:
        pairs = launch.max_q * launch.max_k * launch.count
        for kernel in _able(asked):
            if pairs >= kernel.auto_pairs and kernel.launch_refusal(launch, asked) is None:
                return kernel
    kernel = select_kernel(name, asked)
    if (why := kernel.launch_refusal(launch, asked)) is not None:
        raise UnsupportedError(f"Attention kernel {name!r} cannot serve: {why}. Use 'auto'.")
    return kernel


@lru_cache(maxsize=1024)
def _able(asked: Asked) -> tuple[Kernel, ...]:
    return tuple(kernel for kernel in KERNELS if kernel.refusal(asked) is None)


@lru_cache(maxsize=1024)
def select_kernel(name: str, asked: Asked) -> Kernel:
    """The kernel with this name; for "auto", the first of KERNELS that can serve.

    Raises UnsupportedError for an unknown name, and if the named kernel or all kernels cannot
    serve. The message has the reason and usable kernels.
    """
    return choose_kernel("attention", KERNELS, name, asked)


def forget_choices() -> None:
    """Clear cached choices, after a change of KERNELS."""
    _able.cache_clear()
    select_kernel.cache_clear()
