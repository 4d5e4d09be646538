"""Items, which are sets of rollouts that stay together, and simple placements of items."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from forkpoint.parallel.placement.paths import Paths, Rates
from forkpoint.tree.forest import Forest, IntArray

SCRAMBLE = 2_654_435_761


@dataclass(frozen=True, eq=False)
class Items:
    """Sets of rollouts. Each set is placed on one rank.

    A segment is owned by an item if only rollouts of this item contain it. Other segments are
    shared. A rank computes a shared segment once for all of its items.
    """

    item: IntArray
    """[N] the item of each rollout, 0 .. I - 1."""
    own: IntArray
    """[I] cost of the segments that each item owns."""
    owner: IntArray
    """[S] the item that owns each segment, or -1."""
    shared: IntArray
    """[E] shared segments of each item in order, ascending, as indices into `shared_cost`."""
    begin: IntArray
    """[I + 1] begin of each item in `shared`, and the end."""
    shared_cost: IntArray
    """Cost of each shared segment."""
    shared_segment: IntArray
    """Number of each shared segment, ascending."""

    def __len__(self) -> int:
        return len(self.own)

    @cached_property
    def whole(self) -> IntArray:
        """[I] cost of each item if it is alone on a rank."""
        before = np.concatenate([[0], np.cumsum(self.shared_cost[self.shared])])
        return self.own + before[self.begin[1:]] - before[self.begin[:-1]]


@dataclass(frozen=True, eq=False)
class Priced:
    """Rollouts to place, with their segments and the costs of these."""

    paths: Paths
    forest: Forest
    rates: Rates
    """Rates in a unit that is scaled to these rollouts."""
    cost: IntArray
    """[S] cost of each segment, run once."""

    @classmethod
    def of(cls, paths: Paths, forest: Forest, rates: Rates) -> "Priced":
        """Price the segments of these rollouts' forest."""
        order = paths.order
        dense = rates.rounded_cost(order.edges, paths.labels(order.rollouts, order.edges))
        rates = rates.scaled(float(dense.sum()))
        end, owner = forest.start + forest.length, forest.order[forest.owner_begin]
        found = cls(paths, forest, rates, np.zeros(0, np.int64))
        cost = found.path_cost(owner, end) - found.path_cost(owner, forest.start)
        return cls(paths, forest, rates, cost)

    def path_cost(self, rollouts: IntArray, edges: IntArray) -> IntArray:
        """[n] the cost of the first `edges` edges of each rollout."""
        return self.rates.cost(edges, self.paths.labels(rollouts, edges))

    @cached_property
    def end(self) -> IntArray:
        """[S] the first segment after the subtree of each segment. Segments are in depth-first
        order."""
        return np.searchsorted(self.forest.owner_begin, self.forest.owner_end)

    @property
    def total(self) -> int:
        """Cost on one device, with each shared token counted once."""
        return int(self.cost.sum())

    def split(self, most: int) -> IntArray:
        """Split groups that cost more than `most`, in units of `rates`. Returns [N], the item of
        each rollout.

        Groups and their parts are cut where rollouts diverge, while a part's cost exceeds `most` by
        more than the cost that its parts share.
        """
        groups, order = self.paths.groups, self.paths.order.grouped(self.paths.groups)
        path = self.path_cost(order.rollouts, order.edges)
        above = self.path_cost(order.rollouts, order.shared_edges)
        added = np.concatenate([[0], np.cumsum(path - above)])
        item, count = groups.copy(), int(groups.max()) + 1
        begin = np.searchsorted(groups[order.rollouts], np.arange(count + 1))
        costly = np.flatnonzero(added[begin[1:]] - added[begin[:-1]] > most)
        shared = order.shared_edges
        for number in costly.tolist():
            first = int(begin[number])
            todo = [(first, int(begin[number + 1]))]
            while todo:
                low, high = todo.pop()
                if high - low > 1:
                    cost = path[low] + added[high] - added[low + 1]
                    inner = shared[low + 1 : high]
                    fork = int(inner.argmin())
                    if cost - most > above[low + 1 + fork]:
                        forks = low + 1 + np.flatnonzero(inner == inner[fork])
                        todo.extend(reversed(list(pairwise([low, *forks.tolist(), high]))))
                        continue
                if low > first:
                    item[order.rollouts[low:high]] = count
                    count += 1
        return item

    def items(self, item: IntArray, count: int | None = None) -> Items:
        """Price these items.

        Args:
            item: int64 [N], the item of each rollout, 0 .. I - 1.
            count: I; None if every item has a rollout.
        """
        forest, order = self.forest, self.paths.order
        count = int(item.max()) + 1 if count is None else count
        of_entry = item[order.rollouts]
        changes = np.concatenate([[0], np.cumsum(of_entry[1:] != of_entry[:-1])])
        shared_S = changes[forest.owner_begin] != changes[forest.owner_end - 1]
        owner = np.where(shared_S, -1, of_entry[forest.owner_begin])
        own = np.zeros(count, np.int64)
        np.add.at(own, owner[~shared_S], self.cost[~shared_S])
        segments, size = np.flatnonzero(shared_S), max(1, len(forest))
        # Pairs (item, segment), as item * S + segment, of each item and each shared segment above
        # its rollouts. Ancestors of shared segments are shared, so each level has fewer pairs than
        # the one below.
        rollout = np.flatnonzero(forest.leaf >= 0)
        pairs = np.unique(item[rollout] * size + forest.leaf[rollout])
        found = [pairs[:0]]
        while len(pairs):
            segment = pairs % size
            found.append(pairs[shared_S[segment]])
            above = forest.parent[segment]
            here = above >= 0
            pairs = np.unique(pairs[here] - segment[here] + above[here])
        pairs = np.unique(np.concatenate(found))
        return Items(
            item,
            own,
            owner,
            np.searchsorted(segments, pairs % size),
            np.searchsorted(pairs, np.arange(count + 1) * size),
            self.cost[segments],
            segments,
        )


# Placements
# ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Placement:
    """Items on ranks."""

    items: Items
    rank: IntArray
    """[I] the rank of each item."""
    load: IntArray
    """[R] cost of each rank's items, with shared segments counted once."""


def greedy(items: Items, ranks: int) -> Placement:
    """Place items, the costliest first, each on the rank with the lowest load afterwards.

    Segments that a rank already has add no cost there.
    """
    load = np.zeros(ranks, np.int64)
    held = np.zeros((len(items.shared_cost), ranks), np.int64)
    rank = np.zeros(len(items), np.int64)
    whole, begin = items.whole, items.begin.tolist()
    cost_of = items.shared_cost[items.shared]
    # Items of equal cost are in a scrambled order. Adjacent ones tend to share few tokens, and
    # would be placed on one rank, where a subtree is packed as one piece.
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


def in_order(groups: IntArray, ranks: int, *, whole_groups: bool = False) -> IntArray:
    """Deal out rollouts, or whole groups, in order and in equal numbers. Returns [N], rank by
    rollout."""
    if not whole_groups:
        return np.arange(len(groups)) * ranks // len(groups)
    return groups * ranks // (int(groups.max()) + 1)


def by_tokens(groups: IntArray, lengths: IntArray, ranks: int) -> IntArray:
    """Place groups, those with most tokens first, on the rank with fewest tokens. Returns [N], rank
    by rollout.

    Args:
        groups: [N] the group of each rollout.
        lengths: [N] the tokens of each rollout.
    """
    tokens = np.zeros(int(groups.max()) + 1, np.int64)
    np.add.at(tokens, groups, lengths)
    load, rank = np.zeros(ranks, np.int64), np.zeros(len(tokens), np.int64)
    for group in np.argsort(-tokens, kind="stable").tolist():
        rank[group] = load.argmin()
        load[rank[group]] += tokens[group]
    return rank[groups]


def split_groups(groups: IntArray, rank: IntArray) -> IntArray:
    """The groups that have rollouts on several ranks, ascending."""
    pairs = np.unique(np.stack([groups, rank]), axis=1)[0]
    return np.flatnonzero(np.bincount(pairs) > 1)
