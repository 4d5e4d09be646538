"""A fingerprint of everything about a model, besides weights, that decides what it computes."""

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from forkpoint.hosts.code_provenance import is_defined_as
from forkpoint.hosts.entry import Entry
from forkpoint.hosts.modules import HOOKS, every_module, plain_class

HANDLES = ("_require_grads_hooks", "_require_grads_hook")
"""Attributes that hold handles of hooks by which inputs require gradients."""
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
MOST_STATES = 64
"""States of a model that are remembered, such as training and evaluation."""


class Fingerprint:
    """Tells whether a model is the one that was looked at before, in under a millisecond.

    It covers modules and their attributes, hooks, the functions of their classes and source files,
    torch.nn.functional, the attention functions that the library knows, and configurations. Not
    covered are weights, and what functions call in other files.

    All values are compared at once, as two tuples: Python compares their entries by identity
    first, and an entry that is another object is a change unless it is equal, as numbers are.
    """

    def __init__(self, model: nn.Module, entry: Entry) -> None:
        self.model: nn.Module = model
        self.entry: Entry = entry
        self._modules: tuple[nn.Module, ...] = ()
        self._dicts: list[dict[Any, Any]] = []
        self._lengths: tuple[int, ...] = ()
        self._filled: list[dict[Any, Any]] = []
        """Of `_dicts` those that hold something: most hold no hooks."""
        self._hooks: list[dict[Any, Any]] = []
        """Of those that hold something, the hooks of a module."""
        self._made_anew: list[dict[str, Any]] = []
        """Attributes of modules, some of which are made anew though nothing has changed."""
        self._configs: list[Any] = []
        self._globals: list[Mapping[str, Any]] = []
        self._bases: list[type] = []
        self._states: list[tuple[int, tuple[Any, ...]]] = []
        """Numbers of states and their values, the last one first. They keep objects alive, so that
        a new one cannot be taken for an old one."""
        self._count = 0

    def now(self) -> int:
        """The number of the model's present state."""
        modules = tuple(module for _, module in every_module(self.model))
        if modules != self._modules or tuple(map(len, self._dicts)) != self._lengths:
            self._look_at(modules)
        values = (
            *modules,
            *chain.from_iterable(map(dict.values, self._filled)),
            *chain.from_iterable(map(self._kept_hooks, self._hooks)),
            *chain.from_iterable(map(_attributes, self._made_anew)),
            *self._others(),
        )
        for place, (number, before) in enumerate(self._states):
            if _same(before, values):
                if place:
                    self._states.insert(0, self._states.pop(place))
                return number
        self._count += 1
        # Dictionaries of a module may have been replaced.
        self._look_at(modules)
        self._states = [(self._count, values), *self._states[: MOST_STATES - 1]]
        return self._count

    def _look_at(self, modules: tuple[nn.Module, ...]) -> None:
        """List the dictionaries of the modules, whose values are compared."""
        own = [vars(module) for module in modules]
        parts = [attributes[name] for attributes in own for name in ("_parameters", "_modules")]
        hooks = [attributes[name] for attributes in own for name in HOOKS]
        self._dicts = [*own, *parts, *hooks]
        self._lengths = tuple(map(len, self._dicts))
        self._made_anew = [found for found in own if _is_made_anew(found)]
        plain = [found for found in own if not _is_made_anew(found)]
        self._filled = [found for found in (*plain, *parts) if found]
        self._hooks = [found for found in hooks if found]
        self._configs = self.entry.configs()
        kinds = {plain_class(module) for module in modules}
        self._bases = sorted({base for kind in kinds for base in kind.__mro__}, key=id)
        # A class may name a file that was not imported; what checks classes refuses it.
        files = sorted({kind.__module__ for kind in kinds} & sys.modules.keys())
        self._globals = [*(vars(sys.modules[name]) for name in files), vars(F)]
        self._modules = modules

    def _kept_hooks(self, found: Mapping[Any, Any]) -> list[Any]:
        """Hooks in their order; those that only let inputs require gradients count as one."""
        known = self.entry.requiring_gradients
        kept = [hook for hook in found.values() if not is_defined_as(hook, *known)]
        return kept if len(kept) == len(found) else [*kept, known]

    def _others(self) -> tuple[Any, ...]:
        """Values of classes, files, global hooks and configurations."""
        return (
            *chain.from_iterable(vars(base).values() for base in self._bases),
            # torch.compile keeps what it has compiled under names with two leading underscores. No
            # code of a class can name such a global, because Python mangles the name.
            *(v for named in self._globals for k, v in named.items() if not k.startswith("__")),
            *chain.from_iterable(vars(torch_module)[name].values() for name in GLOBAL_HOOKS),
            *(functions[name] for functions in self.entry.registries for name in functions),
            *(repr(vars(config)) for config in self._configs),
        )


def _is_made_anew(attributes: Mapping[str, Any]) -> bool:
    partials = any(isinstance(value, partial) for value in attributes.values())
    return partials or any(name in attributes for name in HANDLES)


def _attributes(attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Values that are equal where nothing has changed.

    A partial, as transformers makes one each time that checkpointing is enabled, equals no other.
    """
    for name, value in attributes.items():
        if isinstance(value, partial):
            yield (value.func, value.args, value.keywords)
        elif name not in HANDLES:
            yield value


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    try:
        return len(one) == len(other) and one == other
    except Exception:  # of tensors and arrays, which are compared entry by entry
        return False
