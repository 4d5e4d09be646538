"""Chooses a kernel of an operator: by name, or the fastest that can serve."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from forkpoint.errors import UnsupportedError

AUTO = "auto"


class Asked(NamedTuple):
    """Properties of an attention or a recurrence that a kernel is chosen for."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    """Head dim of keys."""
    value_dim: int
    softcap: float = 0.0
    window: int = 0
    deterministic: bool = False
    heads: int = 1
    """Number of query heads."""
    kv_heads: int = 1
    is_large: bool = False
    """Whether a recurrence has a tensor with more elements than 32-bit indices allow."""


def no_refusal(*_: object) -> str | None:
    """The default of `refuses`: nothing is refused."""
    return None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel and the properties for which it has been shown exact. Others are refused."""

    name: str
    device_types: tuple[str, ...] | None
    """Device types on which it runs; None is any."""
    dtypes: tuple[torch.dtype, ...]
    capability: int = 0
    """Least major compute capability of a GPU."""
    refuses_device: Callable[[torch.device], str | None] = no_refusal
    """Returns why it cannot run on a device of the right type (missing package, old GPU), or
    None."""
    refuses: Callable[[Asked], str | None] = no_refusal
    """Returns another reason why it cannot serve ("it needs ..."), or None."""
    deterministic: bool = False
    """Whether its backward can give the same bits each time."""

    def refusal(self, asked: Asked) -> str | None:
        """Why it cannot serve, worded to follow its name; None if it can."""
        device = asked.device
        if self.device_types is not None and device.type not in self.device_types:
            return f"it runs on {', '.join(self.device_types)}, not on {device.type}"
        if asked.dtype not in self.dtypes:
            return f"it takes {', '.join(map(str, self.dtypes))}, not {asked.dtype}"
        if asked.deterministic and not self.deterministic:
            return "its backward is not deterministic"
        major, minor = torch.cuda.get_device_capability(device) if self.capability else (0, 0)
        if major < self.capability:
            least = f"a GPU of compute capability {self.capability}.0 or newer"
            return f"it needs {least}, not {major}.{minor}"
        return self.refuses_device(device) or self.refuses(asked)


Kernel = TypeVar("Kernel", bound=Candidate)


def choose_kernel(what: str, kernels: Sequence[Kernel], name: str, asked: Asked) -> Kernel:
    """The kernel with this name; for "auto", the first that can serve.

    Args:
        what: the operator, as messages name it: "attention".
        kernels: the operator's kernels, fastest first.

    Raises:
        UnsupportedError: there is no such kernel, the named one cannot serve, or none can. The
            message has the reason and the kernels that can serve instead.
    """
    refusals = {kernel.name: kernel.refusal(asked) for kernel in kernels}
    able = [kernel for kernel in kernels if refusals[kernel.name] is None]
    for kernel in able:
        if name in (AUTO, kernel.name):
            return kernel
    if name == AUTO:
        reasons = "; ".join(f"{kernel}: {why}" for kernel, why in refusals.items())
        raise UnsupportedError(
            f"No {what} kernel can serve {asked.dtype} on {asked.device} with head dims "
            f"{asked.head_dim} and {asked.value_dim}. {reasons}. Use another dtype or device."
        )
    can_serve = ", ".join(repr(kernel.name) for kernel in able) or "none"
    if name not in refusals:
        known = ", ".join(repr(kernel.name) for kernel in kernels)
        raise UnsupportedError(
            f"There is no {what} kernel {name!r}; there are {AUTO!r}, {known}. Usable here: "
            f"{can_serve}. Name one of these, or {AUTO!r}."
        )
    raise UnsupportedError(
        f"{what.capitalize()} kernel {name!r} cannot serve: {refusals[name]}. Usable here: "
        f"{can_serve}. Name one of these, or {AUTO!r}."
    )
