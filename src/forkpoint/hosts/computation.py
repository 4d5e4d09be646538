"""Settings of a model that decide what it computes, named, so that a change can be told.

`logprobs` runs the model twice, and the two runs must compute the same. Modes that change no value
may change in between: training and evaluation, checkpointing, and hooks that are known.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from forkpoint.hosts.entry import Entry
from forkpoint.hosts.fingerprint import HANDLES
from forkpoint.hosts.modules import every_module, plain_class

SKIPPED = frozenset(vars(nn.Module())) | {
    *HANDLES,
    *("forward", "gradient_checkpointing", "_gradient_checkpointing_func", "_compiled_call_impl"),
}
"""Attributes that torch gives every module, and those that change how a module runs and not what it
computes."""
UNREAD = frozenset({"use_cache", "_attn_implementation_internal", "output_router_logits"})
"""Settings of a configuration that no step reads."""
CONTAINERS = (list, dict, set)


class Computation:
    """A model's settings at one moment."""

    def __init__(self, model: nn.Module, entry: Entry) -> None:
        # Libraries keep in these lists what they have warned of, and other things of no account.
        loose = (entry.core, entry.decoder)
        self._settings: dict[str, dict[str, Any]] = {
            where: _of_module(module, loose=module in loose)
            for where, module in every_module(model)
        }
        for config in entry.configs():
            values = {k: _content(v) for k, v in vars(config).items() if k not in UNREAD}
            self._settings[type(config).__name__] = values

    def changed(self, later: "Computation") -> str | None:
        """The first setting that is another later, as "module.attribute"; None where there is none.

        Settings that are new do not count.
        """
        for where, values in self._settings.items():
            there = later._settings.get(where, {})
            for name, value in values.items():
                if name not in there or not _same(value, there[name]):
                    return f"{where}.{name}".lstrip(".")
        return None


def _of_module(module: nn.Module, *, loose: bool) -> dict[str, Any]:
    attributes = vars(module)
    found = {
        name: _content(value)
        for name, value in attributes.items()
        if name not in SKIPPED and not (loose and isinstance(value, CONTAINERS))
    }
    own = {"class": plain_class(module), "forward": attributes.get("forward")}
    return {**own, **found, **attributes["_parameters"], **attributes["_modules"]}


def _content(value: Any) -> Any:
    """A copy of a list, a dict or a set, which may change in place."""
    return type(value)(value) if type(value) in CONTAINERS else value


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, (Tensor, nn.Module)):
        return False
    if isinstance(one, partial) and isinstance(other, partial):
        return (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)
    try:
        return bool(one == other)
    except Exception:  # of tensors and arrays, which are compared entry by entry
        return False
