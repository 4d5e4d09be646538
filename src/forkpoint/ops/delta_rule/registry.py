"""The kernels of the gated delta rule there are, and which of them serves."""

import logging
from functools import lru_cache

import torch

from forkpoint.errors import UnsupportedError
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
    refusals = {
        k.name: k.refusal(device, dtype, key_dim, value_dim, deterministic) for k in DELTA_KERNELS
    }
    able = [k for k in DELTA_KERNELS if refusals[k.name] is None]
    can_serve = ", ".join(repr(k.name) for k in able) or "none"
    if name != "auto" and name not in refusals:
        known = ", ".join(repr(k.name) for k in DELTA_KERNELS)
        raise UnsupportedError(
            f"There is no delta-rule kernel {name!r}; there are 'auto', {known}. Able to serve "
            f"here: {can_serve}."
        )
    for kernel in able:
        if name in ("auto", kernel.name):
            if name == "auto" and device.type == "cuda" and dtype in fla.KERNEL.dtypes:
                _tell_of_slower(kernel, refusals)
            return kernel
    if name == "auto":
        reasons = "; ".join(f"{kernel}: {why}" for kernel, why in refusals.items())
        raise UnsupportedError(
            f"No delta-rule kernel can serve {dtype} on {device} with head dims {key_dim} and "
            f"{value_dim}. {reasons}."
        )
    raise UnsupportedError(
        f"Delta-rule kernel {name!r} cannot serve: {refusals[name]}. Able to serve here: "
        f"{can_serve}. Name one of these, or leave the choice to 'auto'."
    )


def _tell_of_slower(kernel: DeltaKernel, refusals: dict[str, str | None]) -> None:
    """Say why the fastest kernel does not serve, once for each kind of call: its package, or what
    that needs, may merely be missing."""
    fastest = DELTA_KERNELS[0].name
    if kernel.name != fastest:
        _log.warning(
            "gated delta rule: %r serves and not the faster %r, because %s.",
            kernel.name,
            fastest,
            refusals[fastest],
        )
