"""Common schedules for ranks whose programs differ.

A program runs microbatches forward and backward, properly nested: the microbatches that read the
prefix cache of another one run between its forward and its backward. Ranks of one job issue
collectives in every forward and every backward, so all must run the same operations in the same
order, although each has microbatches of its own. `align_shapes` gives them a common forest of
*slots*. A rank runs at most one microbatch in a slot. A rank that has none there idles the slot: it
runs one token forward and a zero gradient backward.

Slots keep the order and the nesting of each rank's microbatches: a microbatch is inside another one
if and only if its slot is inside the other's slot. There may be further slots in between, which the
rank idles, and slots around a microbatch that has no parent. This is admissible. An idle slot has
no prefix cache and reads none, so it changes nothing for the rank's own microbatches, and theirs
still run between the forward and the backward of those that they read from.

A microbatch may read several parents. The order of its rank's program decides what it is nested in;
`shape_of` reads the nesting from a program.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isfinite
from operator import index
from typing import NamedTuple

from forkpoint.errors import PlanError
from forkpoint.plan.common_forest import LEVELS, CommonForest, Member
from forkpoint.plan.program import BACKWARD, FORWARD, IDLE, RECOMPUTE

NO_PARENT = -1
CACHED_ALIGNMENTS = 64
"""How many sets of shapes are remembered, the last used."""


class SlotStep(NamedTuple):
    """One operation of a rank in a slot."""

    operation: str
    """FORWARD, RECOMPUTE or BACKWARD."""
    slot: int
    microbatch: int
    """The rank's microbatch in this slot, or IDLE."""


@dataclass(frozen=True)
class Nesting:
    """How the microbatches of a program are nested."""

    order: tuple[int, ...]
    """The program's microbatches in order of their first forwards."""
    parents: tuple[int, ...]
    """By position in `order`: the position of the microbatch it is inside of, or NO_PARENT."""
    recomputed: tuple[bool, ...]
    """By position in `order`: whether it runs forward again before its backward."""


@dataclass(frozen=True)
class Alignment:
    """A common forest of slots, and where each rank runs its microbatches.

    Slots are numbered in the order of their forwards. Every slot is used by at least one rank.
    """

    parents: tuple[int, ...]
    """By slot: the slot it is inside of, or NO_PARENT."""
    recomputed: tuple[bool, ...]
    """By slot: whether all ranks run it forward a second time, which they do if the microbatch of
    any rank asks for it."""
    slots: tuple[tuple[int, ...], ...]
    """By rank, by microbatch in order of forwards: its slot. Rising."""

    @property
    def ratio(self) -> float:
        """Slots over the microbatches of the rank that has most; 1 is the least possible."""
        longest = max(map(len, self.slots))
        return len(self.parents) / longest if longest else 1.0

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that are equal if the common schedule is."""
        text = f"{self.parents} {self.recomputed}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def cost_ratio(self, costs: Sequence[Sequence[float]]) -> float:
        """The cost of all slots over that of the costliest rank; a slot costs what its costliest
        microbatch does.

        Args:
            costs: by rank, by microbatch: its cost, in any unit.
        """
        highest = [0.0] * len(self.parents)
        for slots, own in zip(self.slots, costs, strict=True):
            for slot, cost in zip(slots, own, strict=True):
                highest[slot] = max(highest[slot], cost)
        costliest = max(sum(own) for own in costs)
        return sum(highest) / costliest if costliest else 1.0

    def microbatches(self, rank: int) -> tuple[int, ...]:
        """By slot: the microbatch that a rank runs in it, by its position in the rank, or IDLE."""
        found = [IDLE] * len(self.parents)
        for microbatch, slot in enumerate(self.slots[rank]):
            found[slot] = microbatch
        return tuple(found)

    @cached_property
    def operations(self) -> tuple[tuple[str, int], ...]:
        """Operations of every rank: (operation, slot) in order."""
        found: list[tuple[str, int]] = []
        opened: list[int] = []

        def close(until: int) -> None:
            while opened and opened[-1] != until:
                slot = opened.pop()
                if self.recomputed[slot]:
                    found.append((RECOMPUTE, slot))
                found.append((BACKWARD, slot))

        for slot, parent in enumerate(self.parents):
            close(parent)
            found.append((FORWARD, slot))
            opened.append(slot)
        close(NO_PARENT)
        return tuple(found)

    def program(self, rank: int) -> tuple[SlotStep, ...]:
        """`operations` with a rank's microbatches, by their positions in the rank, or IDLE."""
        microbatches = self.microbatches(rank)
        return tuple(SlotStep(op, slot, microbatches[slot]) for op, slot in self.operations)


def align_shapes(
    shapes: Sequence[Sequence[int]],
    costs: Sequence[Sequence[float]] | None = None,
    recomputed: Sequence[Sequence[bool]] | None = None,
) -> Alignment:
    """Find a common forest of slots for the microbatches of all ranks.

    The number of slots is to be small. For two different shapes it is the least possible. For more
    it is near it; `common_forest` says how it is found. Of as many slots, microbatches of similar
    costs share slots, and so do recomputed ones. Ranks of one shape always get the same slots. The
    result depends neither on the order of ranks nor on the process. Results for the last
    CACHED_ALIGNMENTS sets of shapes, costs (rounded to quarters of the largest) and recomputed
    microbatches are remembered.

    Merging two shapes of n and m microbatches takes O(n m h d^2), where h is the depth and d the
    greatest number of children in the larger one. k different shapes take k - 1 merges, and a
    bounded amount of work to make the result smaller. Shapes of many hundreds of microbatches are
    merged part by part, which takes about linear time and may take more slots than necessary.

    Args:
        shapes: by rank, by microbatch in order of first forwards: the position of the microbatch
            that it is nested in, or NO_PARENT. A rank may have none.
        costs: by rank, by microbatch: predicted milliseconds, or any other unit. None: all equal.
        recomputed: by rank, by microbatch: whether it runs forward twice. None: none does.

    Raises:
        PlanError: there is no rank; a shape is not that of a properly nested program; costs or
            recomputed have other lengths than the shapes; a cost is negative or not finite.
    """
    if not len(shapes):
        raise PlanError(
            "there are no shapes to align; give one of each rank, if only an empty one."
        )
    parents = [tuple(map(index, shape)) for shape in shapes]
    for shape, rank in {shape: rank for rank, shape in enumerate(parents)}.items():
        _check_nested(rank, shape)
    levels = _levels(parents, costs)
    if recomputed is None:
        again = [(False,) * len(shape) for shape in parents]
    else:
        _check_lengths("recomputed", parents, recomputed)
        again = [tuple(map(bool, own)) for own in recomputed]
    members: dict[tuple[int, ...], Member] = {}
    for shape, own_levels, own_again in zip(parents, levels, again, strict=True):
        if not shape:
            continue
        if shape in members:
            other = members[shape]
            own_levels = tuple(map(max, own_levels, other.levels))
            own_again = tuple(map(max, own_again, other.recomputed))
        members[shape] = Member(shape, own_levels, own_again)
    # The largest first; of equally large ones in any order that does not depend on the ranks.
    order = sorted(members, key=lambda shape: (len(shape), shape), reverse=True)
    common, slots = _common(tuple(members[shape] for shape in order))
    slots_of = {(): (), **dict(zip(order, slots, strict=True))}
    found = tuple(slots_of[shape] for shape in parents)
    twice = [False] * len(common)
    for own_slots, own_again in zip(found, again, strict=True):
        for slot, value in zip(own_slots, own_again, strict=True):
            twice[slot] |= value
    return Alignment(common, tuple(twice), found)


@lru_cache(maxsize=CACHED_ALIGNMENTS)
def _common(members: tuple[Member, ...]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Parents of the slots, and the slots of each member."""
    if not members:
        return (), ()
    forest = CommonForest(members)
    forest.refine()
    slots = tuple(tuple(forest.slots(member)) for member in range(len(members)))
    return tuple(forest.shape.parents), slots


def shape_of(program: Iterable[tuple[str, int]]) -> Nesting:
    """Read from a program how its microbatches are nested, in O(n).

    Args:
        program: (operation, microbatch) in order. Each microbatch has one FORWARD, then at most one
            RECOMPUTE, then one BACKWARD; any numbers name microbatches.

    Raises:
        PlanError: the operations are not nested like that.
    """
    position: dict[int, int] = {}
    parents: list[int] = []
    recomputed: list[bool] = []
    opened: list[int] = []
    at, operation, microbatch = 0, "", 0

    def here() -> str:
        return f"step {at} of a program is the {operation} of microbatch {microbatch}"

    for at, (operation, microbatch) in enumerate(program):  # noqa: B007 (of `here`)
        if operation == FORWARD:
            if microbatch in position:
                raise PlanError(f"{here()}, which has run forward before; give each one forward.")
            position[microbatch] = len(parents)
            parents.append(position[opened[-1]] if opened else NO_PARENT)
            recomputed.append(False)
            opened.append(microbatch)
            continue
        if operation not in (RECOMPUTE, BACKWARD):
            raise PlanError(
                f"{here()}; operations are {FORWARD!r}, {RECOMPUTE!r} and {BACKWARD!r}. Leave out "
                "others."
            )
        if not opened or opened[-1] != microbatch:
            innermost = f"the innermost open one is {opened[-1]}" if opened else "none is open"
            raise PlanError(
                f"{here()}, and {innermost}; run the backwards of microbatches in reverse order of "
                "their forwards."
            )
        if operation == BACKWARD:
            opened.pop()
        elif recomputed[position[microbatch]]:
            raise PlanError(f"{here()}, which is its second; give each at most one {RECOMPUTE}.")
        else:
            recomputed[position[microbatch]] = True
    if opened:
        raise PlanError(
            f"a program ends before the backward of microbatch {opened[-1]}; add a backward for "
            "each forward."
        )
    return Nesting(tuple(position), tuple(parents), tuple(recomputed))


def _check_nested(rank: int, shape: tuple[int, ...]) -> None:
    path: list[int] = []
    for node, parent in enumerate(shape):
        while path and path[-1] != parent:
            path.pop()
        if not path and parent != NO_PARENT:
            raise PlanError(
                f"rank {rank}: microbatch {node} has the parent {parent}, which is not open when "
                "it starts; number microbatches in order of their forwards, and give the number of "
                f"one whose backward comes later, or {NO_PARENT} for none."
            )
        path.append(node)


def _check_lengths(
    name: str, shapes: list[tuple[int, ...]], values: Sequence[Sequence[object]]
) -> None:
    if len(values) != len(shapes):
        raise PlanError(
            f"{name} has {len(values)} entries and there are {len(shapes)} ranks; give one for "
            "each."
        )
    for rank, (shape, own) in enumerate(zip(shapes, values, strict=True)):
        if len(own) != len(shape):
            raise PlanError(
                f"rank {rank}: {name} has {len(own)} entries and there are {len(shape)} "
                "microbatches; give one for each."
            )


def _levels(
    shapes: list[tuple[int, ...]], costs: Sequence[Sequence[float]] | None
) -> list[tuple[int, ...]]:
    """Costs as whole numbers from 0 to LEVELS, so that every process computes alike."""
    if costs is None:
        return [(0,) * len(shape) for shape in shapes]
    _check_lengths("costs", shapes, costs)
    largest = 0.0
    for rank, own in enumerate(costs):
        for microbatch, cost in enumerate(own):
            if not (isfinite(cost) and cost >= 0):
                raise PlanError(
                    f"rank {rank}: the cost of microbatch {microbatch} is {cost}; give a finite "
                    "number of at least 0."
                )
            largest = max(largest, float(cost))
    if not largest:
        return [(0,) * len(shape) for shape in shapes]
    return [tuple(round(LEVELS * (float(cost) / largest)) for cost in own) for own in costs]
