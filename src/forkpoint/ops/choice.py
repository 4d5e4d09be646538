"""The choice among the kernels of an operator: by name, or the fastest that can serve."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from forkpoint.errors import UnsupportedError

AUTO = "auto"


class Candidate(Protocol):
    """A kernel by name that says what it cannot serve."""

    @property
    def name(self) -> str: ...

    @property
    def refusal(self) -> Callable[..., str | None]:
        """Why it cannot serve what it is asked for, worded to follow its name; None if it can."""
        ...


Kernel = TypeVar("Kernel", bound=Candidate)


def no_refusal(*_: object) -> str | None:
    """The refusal of a kernel that serves everything that it is asked for."""
    return None


def choose_kernel(
    what: str, kernels: Sequence[Kernel], name: str, asked: tuple[Any, ...]
) -> Kernel:
    """The kernel of that name, or for "auto" the first that can serve.

    Args:
        what: the operator, as messages name it: "attention".
        kernels: the operator's kernels, fastest first.
        asked: the arguments of their `refusal`, first device, dtype, head dim and value dim.

    Raises:
        UnsupportedError: there is no such kernel, the named one cannot serve, or none can. The
            message has the reason and the kernels that can serve instead.
    """
    device, dtype, head_dim, value_dim, *_ = asked
    refusals = {kernel.name: kernel.refusal(*asked) for kernel in kernels}
    able = [kernel for kernel in kernels if refusals[kernel.name] is None]
    for kernel in able:
        if name in (AUTO, kernel.name):
            return kernel
    if name == AUTO:
        reasons = "; ".join(f"{kernel}: {why}" for kernel, why in refusals.items())
        raise UnsupportedError(
            f"No {what} kernel can serve {dtype} on {device} with head dims {head_dim} and "
            f"{value_dim}. {reasons}. Use another dtype or device."
        )
    can_serve = ", ".join(repr(kernel.name) for kernel in able) or "none"
    if name not in refusals:
        known = ", ".join(repr(kernel.name) for kernel in kernels)
        raise UnsupportedError(
            f"There is no {what} kernel {name!r}; there are {AUTO!r}, {known}. Able to serve here: "
            f"{can_serve}. Name one of these, or {AUTO!r}."
        )
    raise UnsupportedError(
        f"{what.capitalize()} kernel {name!r} cannot serve: {refusals[name]}. Able to serve here: "
        f"{can_serve}. Name one of these, or leave the choice to {AUTO!r}."
    )
