"""Settings of a model that decide what it computes, named, so that a change can be told.

`logprobs` runs the model twice, and the two runs must compute the same. Modes that change no value
may change in between: training and evaluation, checkpointing, and hooks that are known.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from forkpoint.hosts.entry import Entry
from forkpoint.hosts.fingerprint import HANDLES
from forkpoint.hosts.modules import every_module, plain_class

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that torch gives every module: its mode, its hooks, parameters and children."""
MODES = frozenset(
    {*HANDLES, "gradient_checkpointing", "_gradient_checkpointing_func", "_compiled_call_impl"}
)
"""Attributes that change how a module runs and not what it computes."""
UNREAD = frozenset({"use_cache", "_attn_implementation_internal", "output_router_logits"})
"""Settings of a configuration that no step reads."""


class Computation:
    """A model's settings at one moment."""

    def __init__(self, model: nn.Module, entry: Entry) -> None:
        self._settings: dict[str, Any] = dict(_settings(model, entry))

    def changed(self, later: "Computation") -> str | None:
        """The first setting that is another later, as "module.attribute"; None where there is none.

        Settings that are new do not count.
        """
        there = later._settings
        for name, value in self._settings.items():
            if name not in there or not _same(value, there[name]):
                return name
        return None


def _settings(model: nn.Module, entry: Entry) -> Iterator[tuple[str, Any]]:
    for where, module in every_module(model):
        attributes, prefix = vars(module), f"{where}." if where else ""
        yield f"{prefix}class", plain_class(module)
        yield f"{prefix}forward", attributes.get("forward")
        for name, value in attributes.items():
            if name in OF_EVERY_MODULE or name in MODES or name == "forward":
                continue
            # Libraries keep in these what they have warned of, and other things of no account.
            if module in (entry.core, entry.decoder) and isinstance(value, (list, dict, set)):
                continue
            yield prefix + name, _content(value)
        for part in ("_parameters", "_modules"):
            for name, value in attributes[part].items():
                yield prefix + name, value
    for config in entry.configs():
        for name, value in vars(config).items():
            if name not in UNREAD:
                yield f"{type(config).__name__}.{name}", _content(value)


def _content(value: Any) -> Any:
    """A copy of a list, a dict or a set, which may change in place."""
    return type(value)(value) if type(value) in (list, dict, set) else value


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
