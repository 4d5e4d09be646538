"""Sorts the kernels of a profile into kinds of work, by their names."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch.autograd.profiler_util import FunctionEventAvg

Kinds = Mapping[str, str]
"""Kinds with a pattern each. A kernel belongs to the first whose pattern is in its name, which is
looked at in lower case."""


@dataclass
class Spent:
    """Time of the kernels of one kind."""

    us: float = 0.0
    launches: int = 0


def kind_of(
    kernel: str, kinds: Kinds, *, compiled: Kinds | None = None, rest: str | None = "rest"
) -> str:
    """The kind of work of a kernel by that name.

    Args:
        kernel: its name.
        kinds: what is asked for.
        compiled: the same for kernels of compiled blocks, whose names list what was fused; None
            asks them for `kinds` as well.
        rest: what is left is called this; with None it stands by its name, cut to 60 characters.
    """
    name = kernel.lower()
    asked = compiled if compiled is not None and name.startswith("triton_") else kinds
    left = kernel[:60] if rest is None else rest
    return next((kind for kind, pattern in asked.items() if re.search(pattern, name)), left)


def by_kind(
    events: Iterable[FunctionEventAvg],
    kinds: Kinds,
    *,
    compiled: Kinds | None = None,
    rest: str | None = "rest",
) -> dict[str, Spent]:
    """Device time and launches of a profile's events by their kinds (see `kind_of`).

    All of `kinds` are there in their order, and then what is left. Events that took no time of the
    device are calls of the host, and not counted.
    """
    spent = {kind: Spent() for kind in (*kinds, *([] if rest is None else [rest]))}
    for event in events:
        if event.self_device_time_total > 0:
            kind = kind_of(event.key or "", kinds, compiled=compiled, rest=rest)
            found = spent.setdefault(kind, Spent())
            found.us += event.self_device_time_total
            found.launches += event.count
    return spent
