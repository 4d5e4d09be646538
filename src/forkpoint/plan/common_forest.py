"""A small ordered forest that holds all of several forests.

The forests are merged one after the other, each by an optimal alignment with what the earlier ones
came to (progressive alignment, after Feng and Doolittle, Journal of Molecular Evolution 25 (1987),
351-360). Then some are taken out and laid over the rest anew (iterative refinement, after Barton
and Sternberg, Journal of Molecular Biology 198 (1987), 327-337), until the counted work reaches a
limit. For two forests the result is the smallest that exists, unless they are so large that they
are merged by parts. For more forests it may be larger than that.

All computation is in whole numbers, and its limits are counts instead of times. So every process
comes to the same result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from forkpoint.plan.ordered_forest import Forests, Shape
from forkpoint.plan.supertree import Base, Ints, Laid, Places, grown
from forkpoint.plan.supertree_parts import Parts

LEVELS = 4
"""Costs are rounded to so many steps up to the largest cost."""
MOST_USERS = 15
"""No difference is made between slots with at least so many users."""
# Two forests are merged exactly if the tables have at most so many entries: the first number
# divided by the number of members, or the second if it is larger. An entry takes about 10 ns.
EXACT_ENTRIES, EXACT_ENTRIES_EACH = 30_000_000, 100_000
# Refinement ends at this work, counted in units of about 0.6 ns on one core of a server.
MOST_WORK = 50_000_000
WORK_OF_MERGE, WORK_OF_NODE, WORK_OF_TABLE, WORK_OF_ENTRY = 250_000, 3_000, 10_000, 9
TAKEN_OUT = (1, 1, 2, 3)
"""How many members are taken out at once, from turn to turn."""
MOST_TURNS = 100


@dataclass(frozen=True)
class Member:
    """A forest that is to be held."""

    parents: tuple[int, ...]
    """Parent of each node in order of opening, -1 for a root; at least one node."""
    levels: tuple[int, ...]
    """Cost of each node, 0 to LEVELS."""
    recomputed: tuple[bool, ...]
    """Whether each node runs forward a second time."""


class CommonForest:
    """The common forest while it is made. Members are named by their positions."""

    def __init__(self, members: Sequence[Member]) -> None:
        """Merge all members, in order. `refine` then makes the result smaller.

        Args:
            members: at least one forest; the largest first gives the best results.
        """
        self.shapes: list[Shape] = [Shape(list(member.parents)) for member in members]
        self._kinds = [
            [2 * level + again for level, again in zip(m.levels, m.recomputed, strict=True)]
            for m in members
        ]
        self._forests = Forests()
        self._numbers = [
            self._forests.of(shape, kinds)
            for shape, kinds in zip(self.shapes, self._kinds, strict=True)
        ]
        self._begin = np.cumsum([0, *map(len, self.shapes)])
        every = np.concatenate([np.array(kinds) for kinds in self._kinds])
        self._level, self._again = every // 2, every % 2
        self._kinds_differ = bool((every != every[0]).any())
        longest = max(map(len, self.shapes))
        # Slots count before costs, and costs before what makes slots fall idle: a node's share in
        # the last two is below `least / longest`.
        self._least = longest * (MOST_USERS + 1) * (LEVELS + 3)
        self._most = longest * 2 * self._least
        self._limit = max(EXACT_ENTRIES // len(members), EXACT_ENTRIES_EACH)
        self.work: int = 0
        """Work done so far, counted."""
        self.shape: Shape = self.shapes[0]
        """The forest of slots."""
        self._slot = np.full(self._begin[-1], -1)  # of all nodes of all members, -1 while out
        self._slot[: len(self.shape)] = np.arange(len(self.shape))
        self._places: Places | None = None
        self._base: Base | None = None
        for member in range(1, len(members)):
            self._put_in(member, prefer_used=False)

    def slots(self, member: int) -> list[int]:
        """The slot of each node of a member."""
        return self._slot[self._begin[member] : self._begin[member + 1]].tolist()

    def size(self) -> tuple[int, int]:
        """Objective, to be small: slots; then the sum over slots of their costliest nodes'
        levels."""
        return len(self.shape), int(self._highest(self._level).sum())

    def refine(self) -> None:
        """Take members out and put them back, until this no longer helps or is too much work.

        A change that makes the forest larger is undone. One member at a time never does, if it is
        merged exactly; several at once may.
        """
        if len(self.shapes) < 3:
            return
        best = self.size()
        if best == (max(map(len, self.shapes)), 0):
            return
        helped = 0
        for turn, trials in enumerate(self._turns()):
            for out in trials:
                if self.work > MOST_WORK:
                    return
                kept = self.shape, self._slot, self._places
                self._take_out(out)
                for member in out:
                    self._put_in(member, prefer_used=True)
                size = self.size()
                if size > best:
                    self.shape, self._slot, self._places = kept
                    self._base = None
                elif size < best:
                    best, helped = size, turn
            if turn - helped >= len(TAKEN_OUT):
                return

    def _turns(self) -> Iterator[list[list[int]]]:
        """Turns of trials; a trial is the members that are taken out at once."""
        count = len(self.shapes)
        for turn in range(MOST_TURNS):
            taken = min(TAKEN_OUT[turn % len(TAKEN_OUT)], count - 1)
            trials = [[(first + n) % count for n in range(taken)] for first in range(count)]
            yield trials if turn % 2 == 0 else trials[::-1]

    def _highest(self, values: Ints) -> Ints:
        """By slot: the greatest of a value over all nodes that use it."""
        highest = np.zeros(len(self.shape), np.int64)
        placed = self._slot >= 0
        np.maximum.at(highest, self._slot[placed], values[placed])
        return highest

    def _users(self) -> Ints:
        """By slot: how many members use it."""
        return np.bincount(self._slot[self._slot >= 0], minlength=len(self.shape))

    def _put_in(self, member: int, *, prefer_used: bool) -> None:
        shape = self.shapes[member]
        laid = self._lay(member, self._worth(set(self._kinds[member]), prefer_used))
        self.work += WORK_OF_MERGE + WORK_OF_NODE * (len(shape) + len(self.shape))
        self.shape, old, new = grown(self.shape, laid)
        self._slot = old[self._slot]
        self._slot[self._begin[member] : self._begin[member + 1]] = new

    def _lay(self, member: int, worth: dict[int, Ints]) -> Laid:
        shape, numbers = self.shapes[member], self._numbers[member]
        if self._places is None or self._places.shape is not self.shape:
            self._places, self._base = Places(self.shape), None
        if len(set(numbers)) * self._places.choices > self._limit:
            parts = Parts(self.shape, shape, self._kinds[member], worth, self._most)
            laid = parts.lay(self._limit)
            self.work += WORK_OF_ENTRY * parts.entries
            return laid
        if self._base is None or not equal(self._base.worth, worth):
            self._base = Base(self._places, worth, self._most)
        before = len(self._base.tables)
        laid = self._base.lay(shape, numbers, self._forests)
        added = len(self._base.tables) - before
        self.work += added * (WORK_OF_TABLE + WORK_OF_ENTRY * self._places.choices)
        return laid

    def _worth(self, kinds: set[int], prefer_used: bool) -> dict[int, Ints]:
        """By kind: [m], what it is worth to lay a node of that kind over each slot."""
        least = np.full(len(self.shape), self._least)
        if prefer_used:
            least += np.minimum(self._users(), MOST_USERS)
        if not self._kinds_differ:
            return dict.fromkeys(kinds, least)
        levels, again = self._highest(self._level), self._highest(self._again)
        return {
            kind: least
            + (MOST_USERS + 1) * (np.minimum(levels, kind // 2) + np.minimum(again, kind % 2))
            for kind in kinds
        }

    def _take_out(self, members: list[int]) -> None:
        """Free the slots of some members, and drop slots that no other member uses."""
        self._slot = self._slot.copy()
        for member in members:
            self._slot[self._begin[member] : self._begin[member + 1]] = -1
        used = (self._users() > 0).tolist()
        if all(used):
            return
        # What is below a dropped slot moves to the nearest slot above that stays.
        now = [-1] * (len(used) + 1)
        parents: list[int] = []
        for slot, (parent, stays) in enumerate(zip(self.shape.parents, used, strict=True)):
            now[slot] = len(parents) if stays else now[parent]
            if stays:
                parents.append(now[parent])
        self._slot = np.array(now)[self._slot]
        self.shape = Shape(parents)


def equal(one: dict[int, Ints], other: dict[int, Ints]) -> bool:
    """Whether two mappings hold the same arrays under the same keys."""
    return one.keys() == other.keys() and all((one[key] == other[key]).all() for key in one)
