"""A fingerprint of everything about a model, besides weights, that decides what it computes."""

import sys
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forkpoint.hosts.modules import every_module
from forkpoint.hosts.origins import is_of_compiler

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)


class Fingerprint:
    """Tells whether a model is the one that was looked at before, in about a millisecond.

    It covers modules and their attributes, hooks, the functions of their classes and source files,
    torch.nn.functional, the attention functions that transformers knows, and configurations. It
    compares objects by identity and keeps those functions alive that it has seen, so that a new one
    cannot have the identity of an old one. Not covered are weights, and what functions call in
    other files.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: nn.Module = model
        self._kept: dict[int, Any] = {}

    def now(self) -> int:
        """The fingerprint of the model as it is."""
        parts: list[int] = []
        kinds: set[type] = set()
        configs: dict[int, Any] = {}
        add = parts.append
        for _, module in every_module(self.model):
            attributes = module.__dict__
            kinds.add(type(module))
            add(hash((type(module), *map(id, attributes.values()))))
            add(hash((*map(id, attributes["_parameters"].values()),)))
            add(hash((*map(id, attributes["_modules"].values()),)))
            for name in HOOKS:
                if attributes[name]:
                    add(self._of(attributes[name]))
            if "config" in attributes:
                configs[id(attributes["config"])] = attributes["config"]
        for config in configs.values():
            add(hash(repr(vars(config))))
        bases = {base for kind in kinds for base in kind.__mro__}
        for base in sorted(bases, key=id):
            add(self._of(vars(base)))
        for name in sorted({kind.__module__ for kind in kinds}):
            named = vars(sys.modules[name])
            add(self._of({key: named[key] for key in named if not is_of_compiler(key)}))
        add(self._of(vars(F)))
        for name in GLOBAL_HOOKS:
            add(self._of(vars(torch_module)[name]))
        for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            add(self._of({name: functions[name] for name in functions}))
        return hash(tuple(parts))

    def _of(self, named: Any) -> int:
        values = tuple(named.values())
        identities = tuple(map(id, values))
        found = hash(identities)
        if found not in self._kept:
            self._kept[found] = values
        return found
