"""Process groups, which are made once for the same ranks and shared by all policies.

A group of gloo has three threads, and a group of NCCL has memory on the device. torch keeps groups
until the default group is destroyed.
"""

from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

T = TypeVar("T")
Ranks = tuple[int, ...]
"""Ranks by their numbers in the default group."""


@dataclass(eq=False)
class _Made:
    """Groups and numbers that were made in one default group, equal on all of its ranks."""

    groups: dict[tuple[Ranks, str | None, bool], dist.ProcessGroup | None] = field(
        default_factory=dict
    )
    """Groups by the arguments of `process_group`."""
    numbers: int = 0


_made: WeakKeyDictionary[dist.ProcessGroup, _Made] = WeakKeyDictionary()
"""Groups by default group, so that those of a destroyed one are not used again."""


def _made_here() -> _Made:
    world = dist.group.WORLD
    assert world is not None, "ranks have a default group"
    return _made.setdefault(world, _Made())


def process_group(
    ranks: Ranks, backend: str | None = None, *, members_only: bool = False
) -> dist.ProcessGroup | None:
    """Make or find the process group of these ranks. Returns None if this rank is not in it.

    Collective the first time: over the default group, or with `members_only` over these ranks.
    `backend`: None for the backend of the default group.
    """
    groups, key = _made_here().groups, (ranks, backend, members_only)
    if key not in groups:
        made = dist.new_group(list(ranks), backend=backend, use_local_synchronization=members_only)
        groups[key] = made if isinstance(made, dist.ProcessGroup) else None
    return groups[key]


def exchange_with_all(value: T) -> list[T]:
    """Exchange the values of all ranks of the default group. Collective over it."""
    every = tuple(range(dist.get_world_size()))
    found: list[T | None] = [None] * len(every)
    dist.all_gather_object(found, value, group=process_group(every, "gloo"))
    return found  # pyright: ignore[reportReturnType]


def next_number() -> int:
    """A new number, the same on all ranks of the default group. All ranks must call this
    together."""
    made = _made_here()
    made.numbers += 1
    return made.numbers
