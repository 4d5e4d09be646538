"""The modules and parameters of a model, listed once a step for all that looks at them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

# A step looks at every module a dozen times before its first row, and to find them takes longer
# than to look.
_walks: ContextVar[dict[tuple[str, nn.Module], list[tuple[str, Any]]] | None] = ContextVar(
    "walks", default=None
)


@contextmanager
def one_walk() -> Iterator[None]:
    """Within it, and all of it within another, each list is made once: nothing may change it."""
    if _walks.get() is not None:
        yield
        return
    token = _walks.set({})
    try:
        yield
    finally:
        _walks.reset(token)


def every_module(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Its modules by name, itself as ""."""
    return _listed("modules", model)


def every_parameter(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Its parameters by name."""
    return _listed("parameters", model)


def _listed(kind: str, model: nn.Module) -> list[tuple[str, Any]]:
    walks = _walks.get()
    if walks is not None and (kind, model) in walks:
        return walks[kind, model]
    found = list(model.named_modules() if kind == "modules" else model.named_parameters())
    if walks is not None:
        walks[kind, model] = found
    return found
