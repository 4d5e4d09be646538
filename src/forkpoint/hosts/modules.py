"""The modules and parameters of a model, listed once a step for all that looks at them."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from forkpoint.engine.changes import Changes

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module that hold its hooks."""
# A step looks at every module a dozen times before its first microbatch, and to find them takes
# longer than to look.
_walks: ContextVar[dict[tuple[str, nn.Module], list[tuple[str, Any]]] | None] = ContextVar(
    "walks", default=None
)


def cache_module_walks(changes: Changes) -> None:
    """Make each list once, until the changes are undone: nothing may change the model meanwhile.

    Where lists are made once already, they go on to be.
    """
    if _walks.get() is None:
        changes.later(_walks.set, None)
        _walks.set({})


def forget_lists() -> None:
    """Make each list once more: what the model consists of has changed."""
    walks = _walks.get()
    if walks is not None:
        walks.clear()


def every_module(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Its modules by name, itself as ""."""
    return _listed("modules", model)


def every_parameter(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Its parameters by name."""
    return _listed("parameters", model)


def plain_class(module: nn.Module) -> type:
    """The class of a module; of one that torch's fully_shard has changed, the class it had.

    fully_shard gives a module a class that is derived from its own and from FSDPModule.
    """
    kind = type(module)
    bases = kind.__bases__
    if len(bases) == 2 and bases[0].__name__ == "FSDPModule":
        return bases[1]
    return kind


def _listed(kind: str, model: nn.Module) -> list[tuple[str, Any]]:
    walks = _walks.get()
    if walks is not None and (kind, model) in walks:
        return walks[kind, model]
    found: list[tuple[str, Any]] = (
        _modules_of(model) if kind == "modules" else _parameters_of(model)
    )
    if walks is not None:
        walks[kind, model] = found
    return found


def _modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """As `named_modules` lists them, without a generator for each level of modules."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    pending: list[tuple[str, nn.Module | None]] = [("", model)]
    while pending:
        name, module = pending.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        found.append((name, module))
        before = f"{name}." if name else ""
        children = reversed(module._modules.items())
        pending += [(before + child_name, child) for child_name, child in children]
    return found


def _parameters_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """As `named_parameters` lists them."""
    found: list[tuple[str, nn.Parameter]] = []
    seen: set[int] = set()
    for where, module in every_module(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((f"{where}.{name}".lstrip("."), parameter))
    return found


def add_hook(
    changes: Changes,
    hooks: dict[int, Any],
    hook: Callable,
    with_kwargs: dict[int, bool] | None = None,
) -> None:
    """Add a hook to a module's `_forward_hooks` or the like, until the changes are undone.

    Not by register_forward_hook: an interrupt after it and before its handle is stored would leave
    the hook in place.

    Args:
        with_kwargs: the module's `_forward_hooks_with_kwargs` or the like, for a hook that takes
            keyword arguments.
    """
    handle = RemovableHandle(hooks, extra_dict=with_kwargs)
    changes.later(handle.remove)
    if with_kwargs is not None:
        with_kwargs[handle.id] = True
    hooks[handle.id] = hook
