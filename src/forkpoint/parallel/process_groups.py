"""Process groups, which are made once for the same ranks and shared by all policies.

A group of gloo has three threads, and a group of NCCL has memory on the device. torch keeps groups
until the default group is destroyed.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from forkpoint.parallel.watch import store_of

_log = logging.getLogger("forkpoint")

T = TypeVar("T")
TOLD_AFTER_S = 30.0
"""Seconds in which all ranks should join, before a warning names those that have not."""
Ranks = tuple[int, ...]
"""Ranks by their numbers in the default group."""


@dataclass(eq=False)
class _Made:
    """Groups and numbers that were made in one default group, equal on all of its ranks."""

    groups: dict[tuple[Ranks, str | None], dist.ProcessGroup | None] = field(default_factory=dict)
    """Groups by the arguments of `process_group`."""
    numbers: int = 0
    exchanges: int = 0


_made: WeakKeyDictionary[dist.ProcessGroup, _Made] = WeakKeyDictionary()
"""Groups by default group, so that those of a destroyed one are not used again."""


def _made_here() -> _Made:
    world = dist.group.WORLD
    assert world is not None, "ranks have a default group"
    return _made.setdefault(world, _Made())


def process_group(ranks: Ranks, backend: str | None = None) -> dist.ProcessGroup | None:
    """Make or find the process group of these ranks. Returns None if this rank is not in it.

    Collective over the default group the first time. `backend`: None for the backend of the default
    group.
    """
    groups, key = _made_here().groups, (ranks, backend)
    if key not in groups:
        # Not with use_local_synchronization, by which members make a group alone. They would wait
        # for each other if their numbers of groups differ, because torch names the group by them.
        # If the default group has a device_id, all of its ranks must split it.
        made = dist.new_group(list(ranks), backend=backend)
        groups[key] = made if isinstance(made, dist.ProcessGroup) else None
    return groups[key]


def exchange_with_all(value: T) -> list[T]:
    """Exchange the values of all ranks of the default group. Collective over it.

    Logs a warning if it waits for ranks.
    """
    every = tuple(range(dist.get_world_size()))
    found: list[T | None] = [None] * len(every)
    with _telling_of_absent(every):
        dist.all_gather_object(found, value, group=process_group(every, "gloo"))
    return found  # pyright: ignore[reportReturnType]


@contextmanager
def _telling_of_absent(every: Ranks) -> Iterator[None]:
    """Log a warning, after a while in the block, that names ranks which have not entered it.

    torch would only raise at the timeout of the process group, after 30 minutes by default.
    """
    made = _made_here()
    made.exchanges += 1
    store = store_of(f"exchange/{made.exchanges}")
    if store is None:
        yield
        return
    store.set(str(dist.get_rank()), "")
    # A store is locked while torch waits in it for other ranks to make a group.
    other: Store = cast(Any, store).clone()

    def tell() -> None:
        absent = [str(rank) for rank in every if not other.check([str(rank)])]
        if absent:
            _log.warning(
                "forkpoint.wrap has waited %.0f s for %d of %d ranks (%s), which have not called "
                "it with a distributed model. All ranks of the default process group must call it "
                "at the same time. Start processes that train no distributed model in a process "
                "group of their own.",
                TOLD_AFTER_S,
                len(absent),
                len(every),
                ", ".join(absent[:8]) + (", ..." if absent[8:] else ""),
            )

    timer = threading.Timer(TOLD_AFTER_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join(1.0)


def next_number() -> int:
    """A new number, the same on all ranks of the default group. All ranks must call this
    together."""
    made = _made_here()
    made.numbers += 1
    return made.numbers
