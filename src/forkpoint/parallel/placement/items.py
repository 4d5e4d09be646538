"""Items to place: sets of rollouts that stay together, and what each adds to a rank."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from forkpoint.parallel.placement.paths import Paths
from forkpoint.parallel.placement.rates import Rates
from forkpoint.tree.forest import Forest, IntArray

SplitPrice = Callable[[int], int]
"""Cost of splitting a group once more, from the cost of what its parts share."""


def replicated(shared_cost: int) -> int:
    """The price of running what the parts share on one more rank."""
    return shared_cost


@dataclass(frozen=True, eq=False)
class Items:
    """Sets of rollouts that each go to one rank.

    A segment through rollouts of one item is that item's own. Any other is shared, and a rank
    computes it once for all of its items.
    """

    item: IntArray
    """[N] the item of each rollout, 0 .. I - 1."""
    own: IntArray
    """[I] cost of the segments that no other item has."""
    owner: IntArray
    """[S] the item that a segment is of alone, or -1."""
    shared: IntArray
    """[E] shared segments of each item, item after item and ascending, as positions in
    `shared_cost`."""
    begin: IntArray
    """[I + 1] where each item begins in `shared`, and the end."""
    shared_cost: IntArray
    """Cost of each shared segment."""
    shared_segment: IntArray
    """Each shared segment, ascending."""

    def __len__(self) -> int:
        return len(self.own)

    @cached_property
    def whole(self) -> IntArray:
        """[I] cost of each item on a rank of its own."""
        before = np.concatenate([[0], np.cumsum(self.shared_cost[self.shared])])
        return self.own + before[self.begin[1:]] - before[self.begin[:-1]]


@dataclass(frozen=True, eq=False)
class Priced:
    """Rollouts to place, with the segments that they share and what these cost."""

    paths: Paths
    forest: Forest
    rates: Rates
    """With whole numbers of units that suit these rollouts."""
    cost: IntArray
    """[S] cost of each segment, run once."""

    @classmethod
    def of(cls, paths: Paths, forest: Forest, rates: Rates) -> "Priced":
        """Price the segments of these rollouts' forest."""
        order = paths.order
        labels = paths.labels(order.rollouts, order.edges)
        dense = rates.cost(order.edges, labels).astype(np.float64).sum()
        rates = rates.scaled(float(dense))
        end, owner = forest.start + forest.length, forest.order[forest.owner_begin]
        cost = paths.cost(rates, owner, end) - paths.cost(rates, owner, forest.start)
        return cls(paths, forest, rates, cost)

    @cached_property
    def end(self) -> IntArray:
        """[S] the first segment after each and all below it: segments are in depth-first order."""
        return np.searchsorted(self.forest.owner_begin, self.forest.owner_end)

    @cached_property
    def subtree_tokens(self) -> IntArray:
        """[S] edges of each segment and all below it."""
        before = self.forest.edge_offsets
        return before[self.end] - before[:-1]

    @cached_property
    def subtree_cost(self) -> IntArray:
        """[S] cost of each segment and all below it."""
        before = np.concatenate([[0], np.cumsum(self.cost)])
        return before[self.end] - before[:-1]

    @property
    def total(self) -> int:
        """Cost of all of it on one device, each shared token once."""
        return int(self.cost.sum())

    def groups(self) -> IntArray:
        """[N] the item of each rollout where each group is one."""
        return self.paths.groups

    def split(
        self, most: int, price: SplitPrice = replicated, among: IntArray | None = None
    ) -> IntArray:
        """[N] the item of each rollout where groups that cost more than `most` are split.

        A group is cut where its rollouts part, and its parts again, while one costs more than
        `most` by more than the price of cutting it. `among` are the groups that may be split; None
        is all.
        """
        paths, by_group = self.paths, self._by_group
        item, count = paths.groups.copy(), int(paths.groups.max()) + 1
        costly = np.flatnonzero(by_group.cost > most)
        for number in (costly if among is None else np.intersect1d(costly, among)).tolist():
            for begin, end in by_group.parts(number, most, price)[1:]:
                item[by_group.rollouts[begin:end]] = count
                count += 1
        return item

    @cached_property
    def _by_group(self) -> "_ByItem":
        return _ByItem.of(self, self.paths.groups)

    def items(self, item: IntArray, count: int | None = None) -> Items:
        """Prices of these items.

        Args:
            item: int64 [N], the item of each rollout, 0 .. I - 1.
            count: I; None where every item has a rollout.
        """
        forest, order = self.forest, self.paths.order
        count = int(item.max()) + 1 if count is None else count
        of_entry = item[order.rollouts]
        changes = np.concatenate([[0], np.cumsum(of_entry[1:] != of_entry[:-1])])
        shared_S = changes[forest.owner_begin] != changes[forest.owner_end - 1]
        owner = np.where(shared_S, -1, of_entry[forest.owner_begin])
        own = np.zeros(count, np.int64)
        np.add.at(own, owner[~shared_S], self.cost[~shared_S])
        numbers = np.cumsum(shared_S) - 1
        segments = np.flatnonzero(shared_S)
        pairs = _pairs(forest, item, shared_S)
        return Items(
            item,
            own,
            owner,
            numbers[pairs % len(forest)] if len(forest) else pairs,
            np.searchsorted(pairs, np.arange(count + 1) * max(1, len(forest))),
            self.cost[segments],
            segments,
        )


@dataclass(frozen=True, eq=False)
class _ByItem:
    """Rollouts item after item, each in the order of its tokens, as what they add to their item."""

    rollouts: IntArray
    """[n] those of at least two tokens."""
    begin: list[int]
    """[I + 1] where each item begins, and the end."""
    shared: list[int]
    """[n] leading edges that each shares with the one before it in its item."""
    above: list[int]
    """[n] the cost of these."""
    path: list[int]
    """[n] the cost of all of its edges."""
    added: list[int]
    """[n + 1] the sum of what all before each add to their items, and of all."""
    cost: IntArray
    """[I] of each item on a rank of its own."""

    @classmethod
    def of(cls, priced: Priced, item: IntArray) -> "_ByItem":
        paths, order = priced.paths, priced.paths.order
        of_entry = item[order.rollouts]
        entries = np.argsort(of_entry, kind="stable")
        shared = shared_edges_of(order.shared_edges, entries)
        shared[1:][np.diff(of_entry[entries]) != 0] = 0
        rollouts = order.rollouts[entries]
        path = paths.cost(priced.rates, rollouts, order.edges[entries])
        above = paths.cost(priced.rates, rollouts, shared)
        begin = np.searchsorted(of_entry[entries], np.arange(int(item.max()) + 2))
        added = np.concatenate([[0], np.cumsum(path - above)])
        cost = added[begin[1:]] - added[begin[:-1]]
        return cls(
            rollouts,
            begin.tolist(),
            shared.tolist(),
            above.tolist(),
            path.tolist(),
            added.tolist(),
            cost,
        )

    def parts(self, number: int, most: int, price: SplitPrice) -> list[tuple[int, int]]:
        """Parts of an item, in order: where each begins and ends."""
        done: list[tuple[int, int]] = []
        todo = [(self.begin[number], self.begin[number + 1])]
        while todo:
            begin, end = todo.pop()
            if end - begin > 1:
                cost = self.path[begin] + self.added[end] - self.added[begin + 1]
                inner = self.shared[begin + 1 : end]
                fork = min(inner)
                trunk = self.above[begin + 1 + inner.index(fork)]
                if cost - most > price(trunk):
                    forks = [begin + 1 + at for at, edges in enumerate(inner) if edges == fork]
                    todo.extend(reversed(list(pairwise([begin, *forks, end]))))
                    continue
            done.append((begin, end))
        return done


def _pairs(forest: Forest, item: IntArray, shared_S: np.ndarray) -> IntArray:
    """Item times S plus segment, of each item and each shared segment above its rollouts, sorted.

    Segments above a shared one are shared, so each level has fewer pairs than the one below.
    """
    size = max(1, len(forest))
    rollout = np.flatnonzero(forest.leaf >= 0)
    pairs = np.unique(item[rollout] * size + forest.leaf[rollout])
    found = [pairs[:0]]
    while len(pairs):
        segment = pairs % size
        found.append(pairs[shared_S[segment]])
        above = forest.parent[segment]
        here = above >= 0
        pairs = np.unique(pairs[here] - segment[here] + above[here])
    return np.unique(np.concatenate(found))


def spans(begin: IntArray, chosen: IntArray) -> tuple[IntArray, IntArray]:
    """Positions of what several runs of entries hold.

    Args:
        begin: [n + 1] where each run begins, and the end.
        chosen: [m] runs, in any order.

    Returns:
        [m] how many entries each has, and the positions of all of them, run after run.
    """
    counts = begin[chosen + 1] - begin[chosen]
    ends = np.cumsum(counts)
    first = np.repeat(begin[chosen] - ends + counts, counts)
    return counts, first + np.arange(len(first))


def shared_edges_of(shared: IntArray, entries: IntArray) -> IntArray:
    """[m] leading edges that each of these entries shares with the one before it.

    Entries that do not ascend share nothing here. Neighbours share what all between them share.
    """
    found = shared[entries].copy()
    found[:1] = 0
    at = np.flatnonzero(np.diff(entries) != 1)
    low, high = entries[at] + 1, entries[at + 1] + 1
    ascend = low < high
    found[at[~ascend] + 1] = 0
    at, bounds = at[ascend] + 1, np.stack([low[ascend], high[ascend]], axis=1).ravel()
    # The last bound may be the end, where no run can begin.
    found[at] = np.minimum.reduceat(np.append(shared, 0), bounds)[::2] if len(at) else 0
    return found
