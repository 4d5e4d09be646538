"""Items to place: sets of rollouts that stay together, and what each adds to a rank."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from forkpoint.forest import Forest, IntArray
from forkpoint.placement.paths import Paths
from forkpoint.placement.rates import Rates

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
    shared: tuple[IntArray, ...]
    """[I] shared segments of each item, ascending, as positions in `shared_cost`."""
    shared_cost: IntArray
    """Cost of each shared segment."""
    shared_segment: IntArray
    """Each shared segment, ascending."""

    def __len__(self) -> int:
        return len(self.own)

    @property
    def whole(self) -> IntArray:
        """[I] cost of each item on a rank of its own."""
        above = [int(self.shared_cost[segments].sum()) for segments in self.shared]
        return self.own + np.asarray(above, np.int64)


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
    def depth(self) -> IntArray:
        """[S] how many segments lie above each."""
        return self.forest.depth

    @cached_property
    def subtree_tokens(self) -> IntArray:
        """[S] edges of each segment and all below it."""
        return self.forest.subtree_edges()

    @cached_property
    def subtree_cost(self) -> IntArray:
        """[S] cost of each segment and all below it."""
        return replace(self.forest, length=self.cost).subtree_edges()

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
        paths = self.paths
        item, count = paths.groups.copy(), int(paths.groups.max()) + 1
        order = paths.order
        by_group = np.argsort(paths.groups[order.rollouts], kind="stable")
        group = paths.groups[order.rollouts[by_group]]
        bounds = np.searchsorted(group, np.arange(count + 1))
        costly = np.flatnonzero(self.costs_of(paths.groups) > most)
        for number in (costly if among is None else np.intersect1d(costly, among)).tolist():
            entries = by_group[bounds[number] : bounds[number + 1]]
            for part in self._parts(entries, most, price)[1:]:
                item[order.rollouts[part]] = count
                count += 1
        return item

    def costs_of(self, item: IntArray) -> IntArray:
        """[I] cost of each item on a rank of its own."""
        order = self.paths.order
        of_entry = item[order.rollouts]
        entries = np.argsort(of_entry, kind="stable")
        shared = shared_edges_of(order.shared_edges, entries)
        shared[1:][of_entry[entries[1:]] != of_entry[entries[:-1]]] = 0
        rollouts = order.rollouts[entries]
        new = self.paths.cost(self.rates, rollouts, order.edges[entries])
        new -= self.paths.cost(self.rates, rollouts, shared)
        found = np.zeros(int(item.max()) + 1, np.int64)
        np.add.at(found, of_entry[entries], new)
        return found

    def _parts(self, entries: IntArray, most: int, price: SplitPrice) -> list[IntArray]:
        """Entries of a group, in order, as parts."""
        order = self.paths.order
        rollouts = order.rollouts[entries]
        shared = shared_edges_of(order.shared_edges, entries)
        path = self.paths.cost(self.rates, rollouts, order.edges[entries])
        above = self.paths.cost(self.rates, rollouts, shared)
        done: list[IntArray] = []
        todo = [(0, len(entries))]
        while todo:
            begin, end = todo.pop()
            cost = int(path[begin] + (path - above)[begin + 1 : end].sum())
            if end - begin > 1:
                inner = shared[begin + 1 : end]
                fork = int(inner.min())
                trunk = int(above[begin + 1 + int(inner.argmin())])
                if cost - most > price(trunk):
                    cuts = [begin, *(begin + 1 + np.flatnonzero(inner == fork)).tolist(), end]
                    todo.extend(reversed(list(pairwise(cuts))))
                    continue
            done.append(entries[begin:end])
        return done

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
        found = np.split(
            numbers[pairs % len(forest)] if len(forest) else pairs,
            np.searchsorted(pairs, np.arange(1, count) * max(1, len(forest))),
        )
        return Items(
            item,
            own,
            owner,
            tuple(found),
            self.cost[segments],
            segments,
        )


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


def shared_edges_of(shared: IntArray, entries: IntArray) -> IntArray:
    """[m] leading edges that each of these entries shares with the one before it.

    Entries that do not ascend share nothing here. Neighbours share what all between them share.
    """
    found = shared[entries].copy()
    found[:1] = 0
    for at in np.flatnonzero(np.diff(entries) != 1).tolist():
        low, high = int(entries[at]) + 1, int(entries[at + 1]) + 1
        found[at + 1] = shared[low:high].min() if low < high else 0
    return found
