"""The state of a model that determines its outputs, without its weights.

`Fingerprint` detects any change since the model was checked. `Computation` names a change between
the two runs of `logprobs`. It ignores modes that change no value: training and evaluation,
checkpointing, and known hooks.
"""

import sys
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from forkpoint.hosts.entry import Entry
from forkpoint.hosts.modules import HOOKS, every_module, plain_class

CHECKPOINTING = "_gradient_checkpointing_func"
HANDLES = ("_require_grads_hooks", "_require_grads_hook", "rope_deltas")
"""Attributes that no step reads: handles of hooks that make inputs require gradients, and values
that multimodal models store in a forward."""
SPECIAL = {CHECKPOINTING, *HANDLES}
MOST_STATES = 64
"""Number of states of a model that are remembered. Training and evaluation are two states."""
CONTAINERS = (list, dict, set)
SKIPPED = frozenset(vars(nn.Module())) | {
    *HANDLES,
    *("forward", "gradient_checkpointing", CHECKPOINTING, "_compiled_call_impl"),
}
"""Attributes that torch gives every module, and those that do not change a module's outputs."""
UNREAD = frozenset({"use_cache", "_attn_implementation_internal", "output_router_logits"})
"""Settings of a configuration that no step reads."""


class Fingerprint:
    """Assigns a number to each state of a model. Takes a few milliseconds.

    A state consists of all modules and their attributes, hooks, the functions of their classes and
    source files, torch.nn.functional, the registered attention functions of the library, and
    configurations. It does not include weights, or functions that are called in other files.

    States are compared as lists. Python compares their entries by identity first. Another object
    counts as a change unless it is equal, as numbers can be. Modules and parameters are held by
    weak references, so that those that the model no longer has are freed.
    """

    def __init__(self, model: nn.Module, entry: Entry) -> None:
        self.model: nn.Module = model
        self.entry: Entry = entry
        self._states: list[tuple[int, list[Any]]] = []
        """Numbers and states, the last used first. They keep other objects alive, so that the
        address of an old object is not used for a new one."""
        self._count = 0

    def now(self) -> int:
        """The number of the model's present state."""
        state = self._state()
        for place, (number, before) in enumerate(self._states):
            if len(before) == len(state) and _same(before, state):
                self._states.insert(0, self._states.pop(place))
                return number
        self._count += 1
        self._states = [(self._count, state), *self._states[: MOST_STATES - 1]]
        return self._count

    def _state(self) -> list[Any]:
        modules = [module for _, module in every_module(self.model)]
        found: list[Any] = [weakref.ref(module) for module in modules]
        for module in modules:
            attributes = vars(module)
            found += _values(attributes)
            for held in (attributes["_parameters"], attributes["_modules"]):
                found += [None if value is None else weakref.ref(value) for value in held.values()]
            for kind in HOOKS:
                if attributes[kind]:
                    hooks = map(_hook, attributes[kind].values())
                    found += {id(hook): hook for hook in hooks}.values()  # some have no hash
        kinds = {plain_class(module) for module in modules}
        for base in sorted({base for kind in kinds for base in kind.__mro__}, key=id):
            found += vars(base).values()
        # A class may name a file that was not imported. Such a class is refused elsewhere.
        files = sorted({kind.__module__ for kind in kinds} & sys.modules.keys())
        for named in (*(vars(sys.modules[name]) for name in files), vars(F)):
            # torch.compile stores compiled code under names with two leading underscores. No code
            # of a class can name such a global, because Python mangles the name.
            found += (value for name, value in named.items() if not name.startswith("__"))
        for kind in HOOKS:
            found += vars(torch_module)[f"_global{kind}"].values()
        for functions in self.entry.registries:
            found += (functions[name] for name in functions)
        found += (repr(vars(config)) for config in self.entry.configs())
        return found


def _hook(hook: Any) -> Any:
    """The code of a hook that is a function without other state; any other hook unchanged.

    transformers makes such hooks anew whenever checkpointing is enabled.
    """
    plain = isinstance(hook, FunctionType) and hook.__closure__ is None and not hook.__defaults__
    return hook.__code__ if plain else hook


class Computation:
    """The named settings of a model at one moment."""

    def __init__(self, model: nn.Module, entry: Entry) -> None:
        # Libraries keep logged warnings and other irrelevant values in lists of these modules.
        loose = (entry.core, entry.decoder)
        self._settings: dict[str, dict[str, Any]] = {
            where: _settings(module, loose=module in loose) for where, module in every_module(model)
        }
        for config in entry.configs():
            values = {k: _copied(v) for k, v in vars(config).items() if k not in UNREAD}
            self._settings[type(config).__name__] = values

    def changed(self, later: "Computation") -> str | None:
        """Name the first setting that differs in `later`, as "module.attribute"; None if none
        differs.

        Settings that only `later` has do not count.
        """
        for where, values in self._settings.items():
            there = later._settings.get(where, {})
            for name, value in values.items():
                if name not in there or not _same_setting(value, there[name]):
                    return f"{where}.{name}".lstrip(".")
        return None


def _settings(module: nn.Module, *, loose: bool) -> dict[str, Any]:
    attributes = vars(module)
    found = {
        name: _copied(value)
        for name, value in attributes.items()
        if name not in SKIPPED and not (loose and isinstance(value, CONTAINERS))
    }
    own = {"class": plain_class(module), "forward": attributes.get("forward")}
    return {**own, **found, **attributes["_parameters"], **attributes["_modules"]}


def _copied(value: Any) -> Any:
    """A copy of a list, a dict or a set, because these may change in place; other values
    unchanged."""
    return type(value)(value) if type(value) in CONTAINERS else value


def _same_setting(one: Any, other: Any) -> bool:
    if one is not other and isinstance(one, (Tensor, nn.Module)):
        return False
    return _same(_parts(one), _parts(other))


def _values(attributes: Mapping[str, Any]) -> Iterable[Any]:
    """Values that are equal where nothing has changed, and that hold no weights."""
    found = dict(attributes)
    del found["_parameters"], found["_buffers"], found["_modules"]
    if found.keys().isdisjoint(SPECIAL):
        return found.values()
    return [_parts(value) for name, value in found.items() if name not in HANDLES]


def _parts(value: Any) -> Any:
    """The parts of a partial, because transformers makes a new one whenever checkpointing is
    enabled, and two partials are never equal."""
    return (value.func, value.args, value.keywords) if isinstance(value, partial) else value


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # of tensors and arrays, which are compared entry by entry
        return False
