"""Settings of a model that decide what it computes, named, so that a change can be told.

`logprobs` runs the model twice, and the two runs must compute the same. Modes that change no value
may change in between: training and evaluation, checkpointing, and hooks that are known.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from forkpoint.hosts.entry import Entry
from forkpoint.hosts.fingerprint import HANDLES
from forkpoint.hosts.modules import every_module, plain_class

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that torch gives every module: its mode, hooks, and what is listed apart."""
MODES = frozenset(
    {*HANDLES, "gradient_checkpointing", "_gradient_checkpointing_func", "_compiled_call_impl"}
)
"""Attributes that change how a module runs and not what it computes."""
UNREAD = frozenset({"use_cache", "_attn_implementation_internal", "output_router_logits"})
"""Settings of a configuration that no step reads."""
MOST_KNOWN = 16

Setting = tuple[str, str, Any]
"""The name of a module, that of an attribute, and its value."""


@dataclass(frozen=True, eq=False)
class Listed:
    """A model's settings, in one of its states."""

    settings: tuple[Setting, ...]
    containers: tuple[Setting, ...]
    """Those that are lists, dicts and sets, which may change in place."""

    def changed(self, later: "Listed") -> tuple[str, str] | None:
        """The first setting that is another later; contents of containers are not compared."""
        if later is self:
            return None
        there = {(where, name): value for where, name, value in later.settings}
        for where, name, value in self.settings:
            if (where, name) not in there:
                return where, name
            other = there[where, name]
            contained = _is_container(value) and type(value) is type(other)
            if not contained and not _same(value, other):
                return where, name
        return None


class Computation:
    """A model's settings at one moment."""

    def __init__(self, listed: Listed) -> None:
        self._listed = listed
        self._contents = [_content(value) for _, _, value in listed.containers]

    def changed(self, later: "Computation") -> str | None:
        """The first setting that is another later, as "module.attribute"; None where there is none.

        Settings that are new do not count.
        """
        found = self._listed.changed(later._listed)
        if found is None and later._contents != self._contents:
            there = later._named()
            named = self._named().items()
            found = next((key for key, one in named if not _same(one, there[key])), None)
        return None if found is None else ".".join(filter(None, found))

    def _named(self) -> dict[tuple[str, str], Any]:
        """Contents of lists, dicts and sets, by module and attribute."""
        pairs = zip(self._listed.containers, self._contents, strict=True)
        return {(where, name): content for (where, name, _), content in pairs}


class Computations:
    """Tells what one model computes, in less than a millisecond where it has not changed."""

    def __init__(self, model: nn.Module, entry: Entry) -> None:
        self.model = model
        self.entry: Entry = entry
        self._known: dict[int, Listed] = {}

    def of(self, number: int) -> Computation:
        """The model's present settings; `number` is that of its present `Fingerprint`."""
        if number not in self._known:
            settings = tuple(_settings(self.model, self.entry))
            listed = Listed(settings, tuple(s for s in settings if _is_container(s[2])))
            # States that differ by their modes alone are one.
            alike = (k for k in self._known.values() if len(k.settings) == len(settings))
            known = next((k for k in alike if k.changed(listed) is None), listed)
            self._known[number] = known
            while len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
        return Computation(self._known[number])


def _settings(model: nn.Module, entry: Entry) -> Iterator[Setting]:
    for where, module in every_module(model):
        attributes = vars(module)
        yield where, "class", plain_class(module)
        yield where, "forward", attributes.get("forward")
        for name, value in attributes.items():
            if name in OF_EVERY_MODULE or name in MODES or name == "forward":
                continue
            # Libraries keep in these what they have warned of, and other things of no account.
            if _is_container(value) and module in (entry.core, entry.decoder):
                continue
            yield where, name, value
        for part in ("_parameters", "_modules"):
            for name, value in attributes[part].items():
                yield where, name, value
    for config in entry.configs():
        for name, value in vars(config).items():
            if name not in UNREAD:
                yield type(config).__name__, name, _content(value)


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, dict, set))


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
