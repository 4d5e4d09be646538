"""Lists of the modules and parameters of a model, made once a step."""

import itertools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from forkpoint.engine.changes import Changes

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module that hold its hooks."""


class _Lists:
    """Cached lists of one step."""

    def __init__(self) -> None:
        self.modules: dict[nn.Module, list[tuple[str, nn.Module]]] = {}
        self.parameters: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {}
        self.places: dict[nn.Module, int] = {}
        """Places of the modules in the first list, if each of them is in one module only."""

    def list_modules(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """List the modules of a model. Those of a part of the first model are a slice of its list,
        which takes less time."""
        begin = self.places.get(model)
        if begin is not None:
            whole = next(iter(self.modules.values()))
            before = f"{whole[begin][0]}."
            inside = itertools.takewhile(lambda of: of[0].startswith(before), whole[begin + 1 :])
            return [("", model), *((name[len(before) :], module) for name, module in inside)]
        found = list(model.named_modules())
        if not self.modules:
            children = (c for _, m in found for c in m._modules.values() if c is not None)
            if len(found) == 1 + sum(1 for _ in children):
                self.places = {module: place for place, (_, module) in enumerate(found)}
        return found


# A step reads every module a dozen times before its first microbatch, and listing them takes longer
# than reading.
_walks: ContextVar[_Lists | None] = ContextVar("walks", default=None)


def cache_module_walks(changes: Changes) -> None:
    """Cache lists until the changes are undone. The model's modules must not change until then.

    Does nothing if lists are cached already.
    """
    if _walks.get() is None:
        changes.later(_walks.set, None)
        _walks.set(_Lists())


def forget_lists() -> None:
    """Drop cached lists, because the model's modules have changed."""
    if _walks.get() is not None:
        _walks.set(_Lists())


def every_module(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of a model, itself with the name ""."""
    lists = _walks.get() or _Lists()
    if model not in lists.modules:
        lists.modules[model] = lists.list_modules(model)
    return lists.modules[model]


def every_parameter(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters of a model, each parameter once."""
    lists = _walks.get() or _Lists()
    if model not in lists.parameters:
        found: dict[nn.Parameter, str] = {}
        for where, module in every_module(model):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found.setdefault(parameter, f"{where}.{name}".lstrip("."))
        lists.parameters[model] = [(name, parameter) for parameter, name in found.items()]
    return lists.parameters[model]


def plain_class(module: nn.Module) -> type:
    """The class of a module before fully_shard.

    fully_shard gives a module a class that is derived from its own and from FSDPModule.
    """
    kind = type(module)
    bases = kind.__bases__
    if len(bases) == 2 and bases[0].__name__ == "FSDPModule":
        return bases[1]
    return kind


def add_hook(
    changes: Changes,
    hooks: dict[int, Any],
    hook: Callable,
    with_kwargs: dict[int, bool] | None = None,
) -> None:
    """Add a hook to a module's `_forward_hooks` or the like, until the changes are undone.

    register_forward_hook is not used, because an interrupt before its handle is stored would leave
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
