"""Ranks for items: a greedy placement that counts what ranks have already, then exchanges.

Everything is counted in whole numbers and in fixed order, and nothing looks at a clock.
"""

from dataclasses import dataclass

import numpy as np

from forkpoint.parallel.placement.items import Items, spans
from forkpoint.tree.forest import IntArray

PARTNERS = 8
"""Ranks that the fullest one tries to exchange with, the emptiest first."""
NOWHERE = 1 << 62
SCRAMBLE = 2_654_435_761
EVEN = 1000
"""A fullest rank within one part of so many of the mean is left as it is."""
ROUNDS_A_RANK = 1
"""Exchanges, at most so many times the number of ranks."""


@dataclass(frozen=True, eq=False)
class Placement:
    """Items on ranks."""

    items: Items
    rank: IntArray
    """[I] the rank of each item."""
    load: IntArray
    """[R] cost of each rank's items, what they share once."""

    @property
    def most(self) -> int:
        """Cost of the fullest rank."""
        return int(self.load.max())


def greedy(items: Items, ranks: int) -> Placement:
    """Place items, the costliest first, each on the rank whose load is least afterwards.

    Tokens that an item shares with the items of a rank cost nothing more there.
    """
    load = np.zeros(ranks, np.int64)
    held = np.zeros((len(items.shared_cost), ranks), np.int64)
    rank = np.zeros(len(items), np.int64)
    whole, begin = items.whole, items.begin.tolist()
    cost_of = items.shared_cost[items.shared]
    # Equal ones in a scrambled order: those that follow each other tend to share a little, and
    # would meet on one rank, where what shares a little is packed as one.
    scrambled = np.arange(len(items)) * SCRAMBLE % (1 << 32)
    for item in np.lexsort((scrambled, -whole)).tolist():
        own = slice(begin[item], begin[item + 1])
        segments = items.shared[own]
        after = load - np.add.reduce(held.take(segments, axis=0), axis=0)
        chosen = int(after.argmin())
        load[chosen] = after[chosen] + whole[item]
        held[segments, chosen] = cost_of[own]
        rank[item] = chosen
    return Placement(items, rank, load)


def in_rounds(items: Items, ranks: int) -> IntArray:
    """[I] ranks for items in rounds of one a rank, the costliest first to the emptiest rank.

    Ranks then have as many items as each other, of like costs, and their microbatches are alike.
    """
    load, rank = np.zeros(ranks, np.int64), np.zeros(len(items), np.int64)
    scrambled = np.arange(len(items)) * SCRAMBLE % (1 << 32)
    order = np.lexsort((scrambled, -items.whole))
    for begin in range(0, len(items), ranks):
        taken = order[begin : begin + ranks]
        emptiest = np.argsort(load, kind="stable")[: len(taken)]
        rank[taken] = emptiest
        load[emptiest] += items.own[taken]
    return rank


def improved(placement: Placement) -> Placement:
    """The placement after moves and exchanges of items that lower the fullest rank.

    Each round takes the fullest rank and the emptiest others, one after the other, until a move or
    an exchange with one of them leaves both below what the fullest had.
    """
    items, ranks = placement.items, len(placement.load)
    state = _State(items, placement.rank.copy(), placement.load.copy())
    for _ in range(ROUNDS_A_RANK * ranks):
        full = int(state.load.argmax())
        if (int(state.load[full]) - int(state.load.sum()) // ranks) * EVEN <= state.load[full]:
            break
        by_load = np.lexsort((np.arange(ranks), state.load))
        if not any(
            state.relieve(full, int(other)) for other in by_load[:PARTNERS] if other != full
        ):
            break
    return Placement(items, state.rank, state.load)


class _State:
    """Items of each rank, while they move."""

    def __init__(self, items: Items, rank: IntArray, load: IntArray) -> None:
        self.items, self.rank, self.load = items, rank, load
        self.flat, self.begin = items.shared, items.begin
        self.has = np.zeros((len(items.shared_cost), len(load)), np.int32)
        of_pair = np.repeat(np.arange(len(items)), np.diff(self.begin))
        np.add.at(self.has, (self.flat, rank[of_pair]), 1)

    def relieve(self, full: int, other: int) -> bool:
        """Move an item of one rank to another, or exchange two, if that lowers the fuller one."""
        mine, theirs = np.flatnonzero(self.rank == full), np.flatnonzero(self.rank == other)
        gap = int(self.load[full] - self.load[other])
        if gap <= 0 or not len(mine):
            return False
        # By what leaves each, as if the other had nothing of it; the exact loads decide.
        gives = self._leaves(mine, full)
        takes = np.concatenate([[0], self._leaves(theirs, other)])
        order = np.argsort(takes, kind="stable")
        # The exchange that moves half of the gap would leave both equal.
        near = np.searchsorted(takes[order], gives - gap // 2)
        tries: list[tuple[int, int, int]] = []
        for step in (-1, 0):
            take = order[np.clip(near + step, 0, len(takes) - 1)]
            off = np.abs(2 * (gives - takes[take]) - gap)
            tries += zip(off.tolist(), range(len(mine)), take.tolist(), strict=True)
        for off, give, take in sorted(tries)[:PARTNERS]:
            if off >= gap:
                return False
            swap = None if take == 0 else int(theirs[take - 1])
            if self._exchange(int(mine[give]), swap, full, other):
                return True
        return False

    def _exchange(self, give: int, take: int | None, full: int, other: int) -> bool:
        before = int(self.load[full])
        self._move(give, full, other)
        if take is not None:
            self._move(take, other, full)
        if max(self.load[full], self.load[other]) < before:
            return True
        if take is not None:
            self._move(take, full, other)
        self._move(give, other, full)
        return False

    def _leaves(self, items: IntArray, rank: int) -> IntArray:
        """[n] cost that leaves a rank with each of its items."""
        counts, at = spans(self.begin, items)
        ends, segments = np.cumsum(counts), self.flat[at]
        alone = np.where(self.has[segments, rank] == 1, self.items.shared_cost[segments], 0)
        before = np.concatenate([[0], np.cumsum(alone)])
        return self.items.own[items] + before[ends] - before[ends - counts]

    def _move(self, item: int, source: int, target: int) -> None:
        segments, one = self.flat[self.begin[item] : self.begin[item + 1]], np.asarray([item])
        self.load[source] -= self._leaves(one, source)[0]
        self.has[segments, source] -= 1
        self.has[segments, target] += 1
        self.load[target] += self._leaves(one, target)[0]
        self.rank[item] = target
