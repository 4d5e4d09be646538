"""Pieces of single ranks, made anew for each set of items that is tried.

Items of one rank that share a segment lie in one subtree, which may go into one microbatch whole.
"""

from collections.abc import Iterable

import numpy as np

from forkpoint.placement.items import Items, Priced
from forkpoint.placement.packed import TOO_MANY


class RankPieces:
    """The largest subtrees that fit in a microbatch, of any set of items."""

    def __init__(self, priced: Priced, items: Items, capacity: int) -> None:
        forest = priced.forest
        self.capacity: int = capacity
        tokens, cost = priced.subtree_tokens, priced.subtree_cost
        number = np.full(len(forest) + 1, -1, np.int64)
        number[items.shared_segment] = np.arange(len(items.shared_segment))
        parent = number[forest.parent]
        private = items.owner >= 0
        below = private & (forest.parent >= 0) & private[forest.parent]
        large = private & (tokens > capacity)
        fits = private & ~large
        tops = fits & ~(below & fits[forest.parent])
        self._hangs: list[list[tuple[int, int, int]]] = [[] for _ in range(len(items))]
        """By item: (shared segment above, tokens, cost) of each of its own subtrees."""
        for segment in np.flatnonzero(tops).tolist():
            above = int(parent[segment]) if not below[segment] else -1
            entry = (above, int(tokens[segment]), int(cost[segment]))
            self._hangs[items.owner[segment]].append(entry)
        self._heavy: list[list[int]] = [[] for _ in range(len(items))]
        """By item: shared segments with a subtree of it below that does not fit."""
        for segment in np.flatnonzero(large & ~below).tolist():
            if parent[segment] >= 0:
                self._heavy[items.owner[segment]].append(int(parent[segment]))
        self._shared = items.shared_lists
        self._parent: list[int] = parent[items.shared_segment].tolist()
        self._tokens: list[int] = forest.length[items.shared_segment].tolist()
        self._cost: list[int] = items.shared_cost.tolist()

    def packed(self, pieces: Iterable[tuple[int, int]], bins: int) -> list[int]:
        """Costs of the microbatches of a rank with these pieces, as `packed.packed` gives them."""
        room, found = [self.capacity] * bins, [0] * bins
        for tokens, cost in pieces:
            for place, left in enumerate(room):
                if left >= tokens:
                    room[place] -= tokens
                    found[place] += cost
                    break
            else:
                return [TOO_MANY] * bins
        return found

    def of(self, items: Iterable[int]) -> list[tuple[int, int]]:
        """Tokens and costs of the pieces of a rank with these items, by descending tokens."""
        tokens: dict[int, int] = {-1: self.capacity + 1}
        cost: dict[int, int] = {-1: 0}
        items = list(items)
        for item in items:
            for segment in self._shared[item]:
                tokens[segment], cost[segment] = self._tokens[segment], self._cost[segment]
        for item in items:
            for above, own_tokens, own_cost in self._hangs[item]:
                tokens[above] += own_tokens
                cost[above] += own_cost
            for segment in self._heavy[item]:
                tokens[segment] += self.capacity
        # A segment's number is above its parent's.
        shared = sorted(tokens, reverse=True)[:-1]
        for segment in shared:
            above = self._parent[segment]
            tokens[above] += tokens[segment]
            cost[above] += cost[segment]
        most, found = self.capacity, []
        for segment in shared:
            if tokens[segment] <= most < tokens[self._parent[segment]]:
                found.append((tokens[segment], cost[segment]))
        for item in items:
            found += [(t, c) for above, t, c in self._hangs[item] if tokens[above] > most]
        found.sort(reverse=True)
        return found
