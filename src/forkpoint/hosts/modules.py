"""Lists of the modules and parameters of a model, made once a step."""

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
        self.whole: _Walk | None = None
        """The walk of the first listed model."""

    def clear(self) -> None:
        self.modules, self.parameters, self.whole = {}, {}, None


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
    lists = _walks.get()
    if lists is not None:
        lists.clear()


def every_module(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of a model, itself with the name ""."""
    lists = _walks.get()
    if lists is None:
        return _Walk(model).found
    if model not in lists.modules:
        if lists.whole is None:
            lists.whole = _Walk(model)
        part = lists.whole.part(model)
        lists.modules[model] = _Walk(model).found if part is None else part
    return lists.modules[model]


def every_parameter(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters of a model."""
    lists = _walks.get()
    if lists is None:
        return _parameters_of(model)
    if model not in lists.parameters:
        lists.parameters[model] = _parameters_of(model)
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


class _Walk:
    """The modules of a model as `named_modules` lists them, without a generator for each level."""

    def __init__(self, model: nn.Module) -> None:
        self.found: list[tuple[str, nn.Module]] = []
        self._depths: list[int] = []
        self._places: dict[nn.Module, int] = {}
        self._shares = False
        """Whether a module occurs in several others. It is listed only in the first."""
        pending: list[tuple[str, nn.Module | None, int]] = [("", model, 0)]
        while pending:
            name, module, depth = pending.pop()
            if module is None:
                continue
            if module in self._places:
                self._shares = True
                continue
            self._places[module] = len(self.found)
            self.found.append((name, module))
            self._depths.append(depth)
            before = f"{name}." if name else ""
            for child_name, child in reversed(module._modules.items()):
                pending.append((before + child_name, child, depth + 1))

    def part(self, module: nn.Module) -> list[tuple[str, nn.Module]] | None:
        """The list of a module within the model; None if a separate walk is needed."""
        begin = self._places.get(module)
        if begin == 0:
            return self.found
        if begin is None or self._shares:
            return None
        found, depth = [("", module)], self._depths[begin]
        cut = len(self.found[begin][0]) + 1
        for at in range(begin + 1, len(self.found)):
            if self._depths[at] <= depth:
                break
            name, inner = self.found[at]
            found.append((name[cut:], inner))
        return found


def _parameters_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """As `named_parameters` lists them."""
    found: list[tuple[str, nn.Parameter]] = []
    seen: set[int] = set()
    for where, module in every_module(model):
        before = f"{where}." if where else ""
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((before + name, parameter))
    return found


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
