"""The modules of a model, listed once for all that looks at them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

# A step's checks look at every module a dozen times, and to find them takes longer than to look.
_walks: ContextVar[dict[nn.Module, list[tuple[str, nn.Module]]] | None] = ContextVar(
    "walks", default=None
)


@contextmanager
def one_walk() -> Iterator[None]:
    """Within it modules are listed once for all checks: nothing may change them meanwhile."""
    token = _walks.set({})
    try:
        yield
    finally:
        _walks.reset(token)


def every_module(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Its modules by name, itself as ""."""
    walks = _walks.get()
    if walks is None:
        return list(model.named_modules())
    if model not in walks:
        walks[model] = list(model.named_modules())
    return walks[model]
