"""The kernels of the gated delta rule there are, and which of them serves."""

import logging
from functools import lru_cache

import torch

from forkpoint.ops.choice import AUTO, choose_kernel
from forkpoint.ops.delta_rule import chunked, fla, reference
from forkpoint.ops.delta_rule.kernel import DeltaKernel

DELTA_KERNELS: tuple[DeltaKernel, ...] = (fla.KERNEL, chunked.KERNEL, reference.KERNEL)
"""Fastest first: "auto" takes the first that can serve. Each serves only what its record says."""

_log = logging.getLogger("forkpoint")


@lru_cache(maxsize=1024)
def select_delta_kernel(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    deterministic: bool,
) -> DeltaKernel:
    """The kernel of that name, or for "auto" the first of DELTA_KERNELS that can serve.

    Raises UnsupportedError for a name that is none and for a named kernel that cannot serve; the
    message has the reason and what can serve instead.
    """
    asked = (device, dtype, key_dim, value_dim, deterministic)
    chosen = choose_kernel("delta-rule", DELTA_KERNELS, name, asked)
    if name == AUTO and device.type == "cuda" and dtype in fla.KERNEL.dtypes:
        fastest = DELTA_KERNELS[0]
        if chosen is not fastest:
            # Its package, or what that needs, may merely be missing. Choices are kept, so that this
            # is said once for each kind of call.
            _log.warning(
                "gated delta rule: %r serves and not the faster %r, because %s.",
                chosen.name,
                fastest.name,
                fastest.refusal(*asked),
            )
    return chosen
