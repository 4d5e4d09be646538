"""Predicts the microbatches of ranks, and improves placements by exchanges of items.

Ranks run their k-th microbatches together. So a step is faster if the k-th microbatches of all
ranks cost the same. Planners pack whole subtrees, the largest first, into the first microbatch with
room, and put shared ancestors into microbatches above. This module does the same for all ranks at
once, with sums of tokens and costs only. It exchanges items between ranks so that costs of slots
become more equal.

The objective is the sum over slots of a high norm of the ranks' costs in the slot. A norm is used
instead of the maximum, because many ranks are near the maximum, and lowering one of them must
improve the objective. It is computed only by multiplications and square roots, which every
processor rounds equally.
"""

from bisect import insort
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forkpoint.parallel.placement.items import Items, Placement, Priced
from forkpoint.plan.pricing.meters import ROW_TOKENS
from forkpoint.tree.forest import IntArray

TOO_MANY = 1 << 56
"""Cost of a row whose pieces do not fit in its microbatches."""
FloatArray = NDArray[np.float64]


class Pieces(NamedTuple):
    """Subtrees that each fit in one microbatch, by row (a rank or an item)."""

    row: IntArray
    """[P] ascending."""
    tokens: IntArray
    """[P]"""
    cost: IntArray
    """[P]"""

    def table(self, rows: int) -> tuple[IntArray, IntArray]:
        """Tokens and costs of each row's pieces, [rows, P] each, in the order of descending
        tokens."""
        order = np.lexsort((-self.cost, -self.tokens, self.row))
        row = self.row[order]
        counts = np.bincount(row, minlength=rows)
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens, cost = np.zeros((2, rows, int(counts.max(initial=0))), np.int64)
        tokens[row, place], cost[row, place] = self.tokens[order], self.cost[order]
        return tokens, cost


class Cutter:
    """Cuts sets of items into pieces: the largest subtrees that fit in a microbatch."""

    def __init__(self, priced: Priced, items: Items, capacity: int) -> None:
        self.priced: Priced = priced
        self.items: Items = items
        self.capacity: int = capacity
        forest, private = priced.forest, items.owner >= 0
        first = np.arange(len(forest))
        tokens = _sums(forest.length, first, priced.end)
        large = private & (tokens > capacity)
        fits = private & ~large
        # Nodes of items. A node that fits includes its subtree.
        node = np.flatnonzero(large | (fits & ~((forest.parent >= 0) & fits[forest.parent])))
        self.node: IntArray = node[np.argsort(items.owner[node], kind="stable")]
        self.begin: IntArray = np.searchsorted(items.owner[self.node], np.arange(len(items) + 1))
        self.tokens: IntArray = np.where(large, forest.length, tokens)[self.node]
        cost = np.where(large, priced.cost, _sums(priced.cost, first, priced.end))
        self.cost: IntArray = cost[self.node]

    def pieces(self, row: IntArray, item: IntArray) -> Pieces:
        """The pieces of each row. The row `row[i]` has the item `item[i]`.

        Items of one row that share a segment are in one subtree, which may be one piece.

        Args:
            row: [n] index of a row.
            item: [n] an item of each.
        """
        forest, size = self.priced.forest, max(1, len(self.priced.forest))
        nodes, at = _spans(self.begin, item)
        shares, copies = _spans(self.items.begin, item)
        shared = self.items.shared[copies]
        of_shared = self.items.shared_segment[shared]
        segment = np.concatenate([self.node[at], of_shared])
        tokens = np.concatenate([self.tokens[at], forest.length[of_shared]])
        cost = np.concatenate([self.cost[at], self.items.shared_cost[shared]])
        rows = np.concatenate([np.repeat(row, nodes), np.repeat(row, shares)])
        # A row has each segment once, in depth-first order, so a subtree follows its root.
        key, once = np.unique(rows * size + segment, return_index=True)
        rows, segment = rows[once], segment[once]
        first, end = (
            np.arange(len(key)),
            np.searchsorted(key, rows * size + self.priced.end[segment]),
        )
        tokens, cost = _sums(tokens[once], first, end), _sums(cost[once], first, end)
        fits, parent = tokens <= self.capacity, forest.parent[segment]
        above = np.searchsorted(key, key - segment + parent)
        tops = np.flatnonzero(fits & ~((parent >= 0) & fits[np.minimum(above, len(key) - 1)]))
        return Pieces(rows[tops], tokens[tops], cost[tops])


def _sums(values: IntArray, begin: IntArray, end: IntArray) -> IntArray:
    """[n] sums of values[begin:end]."""
    before = np.concatenate([[0], np.cumsum(values)])
    return before[end] - before[begin]


def _spans(begin: IntArray, chosen: IntArray) -> tuple[IntArray, IntArray]:
    """Numbers of entries of the chosen runs, and the positions of all these entries, run after run.

    Args:
        begin: [n + 1] begin of each run, and the end.
        chosen: [m] runs, in any order.
    """
    counts = begin[chosen + 1] - begin[chosen]
    first = np.repeat(begin[chosen] - np.cumsum(counts) + counts, counts)
    return counts, first + np.arange(len(first))


def packed(tokens: IntArray, cost: IntArray, capacity: int, bins: int | None = None) -> IntArray:
    """Pack pieces into microbatches. Returns [rows, bins], the costs of each row's microbatches in
    order.

    Args:
        tokens: [rows, P] tokens of each row's pieces, descending; 0 for no piece.
        cost: [rows, P] their costs.
        capacity: tokens of a microbatch.
        bins: number of microbatches of a row. If pieces do not fit, the row costs TOO_MANY. None:
            enough, because any two adjacent microbatches together hold more than `capacity`.
    """
    if bins is None:
        bins = int(2 * tokens.sum(axis=1).max(initial=0) // capacity) + 2
    rows = len(tokens)
    begin = np.arange(rows) * bins
    found, room = np.zeros(rows * bins, np.int64), np.full((rows, bins), capacity, np.int64)
    flat = room.reshape(-1)
    columns = np.ascontiguousarray(tokens.T), np.ascontiguousarray(cost.T)
    for sizes, costs in zip(*columns, strict=True):
        first = (room >= sizes[:, None]).argmax(axis=1)
        first += begin
        flat[first] -= sizes
        found[first] += costs
    found = found.reshape(rows, bins)
    found[(room < 0).any(axis=1)] = TOO_MANY
    return found


def lockstep_cost(priced: Priced, rank: IntArray, ranks: int, capacity: int) -> int:
    """Predicted cost of a step in which ranks run their microbatches in lockstep.

    Args:
        rank: int64 [N] the rank of each rollout.
        capacity: tokens of a microbatch.
    """
    items, every = priced.items(rank, ranks), np.arange(ranks)
    pieces = Cutter(priced, items, capacity).pieces(every, every)
    load, inside = items.whole, np.zeros(ranks, np.int64)
    np.add.at(inside, pieces.row, pieces.cost)
    slowest = packed(*pieces.table(ranks), capacity).max(axis=0)
    overhead = int(priced.rates.token * ROW_TOKENS / priced.rates.unit_cost)
    # Segments that are in no piece are in microbatches above.
    return int(slowest.sum() + (load - inside).max()) + overhead * int((slowest > 0).sum())


# Exchanges of items between ranks
# ------------------------------------------------------------

A_SLOT = 0.1
"""Added cost of each microbatch, relative to the costliest one. Without it, small pieces would be
spread over many ranks, and the last slot would stay."""
SQUARINGS = 3
"""Number of squarings: the norm's exponent is 2 ** SQUARINGS."""
MOST_ITEMS = 6
"""Number of a rank's items that are tried, spread from the smallest to the largest."""
TRIES, WORK = 640, 500_000
"""Largest number of pairs of ranks that are tried, and that number times the square of a rank's
pieces. Ranks with many pieces have many full microbatches, so they have little to gain, and a try
takes longer."""
PATIENCE = 10
"""Number of failed attempts after which a rank is not tried again."""
SLACK = 200
"""An exchange may raise a rank's load to at most 1 + 1 / SLACK times the highest load."""


def reshaped(priced: Priced, placement: Placement, capacity: int) -> IntArray:
    """Exchange items so that costs of ranks' microbatches become more equal. Returns [I], rank by
    item."""
    search = _Exchanges(placement, Cutter(priced, placement.items, capacity))
    search.run()
    return search.rank


class _Exchanges:
    """A search for exchanges: the ranks of items, and the ranks' terms of the objective."""

    def __init__(self, placement: Placement, cutter: Cutter) -> None:
        items, self.ranks = placement.items, len(placement.load)
        self.capacity, self.cutter = cutter.capacity, cutter
        self.own: list[int] = [*items.own.tolist(), 0]
        """[I + 1] costs that items own; the last entry is 0, for no item."""
        self.none = len(items)
        self.rank, self.load = placement.rank.copy(), placement.load.tolist()
        self.most: int = max(self.load) + max(self.load) // SLACK
        by_size = np.lexsort((items.own, self.rank))
        bounds = np.searchsorted(self.rank[by_size], np.arange(1, self.ranks))
        self.of_rank = [found.tolist() for found in np.split(by_size, bounds)]
        """[R] items of each rank, in the order of cost."""
        pieces = cutter.pieces(self.rank, np.arange(len(items)))
        most = max(1, int(np.bincount(pieces.row, minlength=1).max()))
        self.tries: int = min(TRIES, WORK // most**2)
        table = packed(*pieces.table(self.ranks), self.capacity)
        self.bins = int((table > 0).any(axis=0).sum()) + 1
        self.scale = float(max(1, int(table.max())))
        self.powers = self._powers(table[:, : self.bins])
        self.norms: FloatArray = self.powers.sum(axis=0)

    def run(self) -> None:
        """Exchange items of the costliest rank, until no rank finds an improvement or after
        `tries`."""
        failed = np.zeros(self.ranks, np.int64)
        for turn in range(self.tries):
            # Each rank's share of the objective's gradient.
            slope = _root(self.norms) / np.maximum(self.norms, 1e-300)
            share = np.where(failed < PATIENCE, (self.powers * slope).sum(axis=1), 0.0)
            worst = int(share.argmax())
            if share[worst] <= 0:
                return
            # Partners in a pseudo-random order, because it depends on sizes whether an exchange
            # helps.
            pair = [worst, (worst + 1 + (turn * 7919) % (self.ranks - 1)) % self.ranks]
            if self._exchange(pair):
                failed[pair] = 0
            else:
                failed[worst] += 1

    def _exchange(self, pair: list[int]) -> bool:
        """Make the best exchange between two ranks. Returns False if none improves the
        objective."""
        moves = self._able(pair)
        if not moves:
            return False
        rows: list[int] = []
        items: list[int] = []
        sides = [
            side for give, take in moves for side in ((pair[0], give, take), (pair[1], take, give))
        ]
        for row, (rank, gone, new) in enumerate(sides):
            left = [item for item in (*self.of_rank[rank], new) if item not in (gone, self.none)]
            items += left
            rows += [row] * len(left)
        pieces = self.cutter.pieces(np.asarray(rows), np.asarray(items))
        table = packed(*pieces.table(len(sides)), self.capacity, self.bins)
        powers = self._powers(table).reshape(len(moves), 2, -1)
        rest = self.norms - self.powers[pair].sum(axis=0)
        norms = np.maximum(rest + powers.sum(axis=1), 0.0)
        score = _root(norms).sum(axis=1)
        best = int(score.argmin())
        if score[best] >= float(_root(self.norms).sum()) * (1 - 1e-6):
            return False
        for item, source, target in zip(moves[best], pair, pair[::-1], strict=True):
            if item != self.none:
                self.rank[item] = target
                self.load[source] -= self.own[item]
                self.load[target] += self.own[item]
                self.of_rank[source].remove(item)
                insort(self.of_rank[target], item, key=self.own.__getitem__)
        self.powers[pair] = powers[best]
        self.norms = self.powers.sum(axis=0)
        return True

    def _able(self, pair: list[int]) -> list[tuple[int, int]]:
        """Exchanges after which neither rank exceeds the allowed load, as pairs of given and taken
        items."""
        some: list[list[int]] = []
        for items in (self.of_rank[rank] for rank in pair):
            if len(items) > MOST_ITEMS:
                # Spread over their sizes.
                last = len(items) - 1
                items = [items[place * last // (MOST_ITEMS - 1)] for place in range(MOST_ITEMS)]
            some.append([*items, self.none])
        room = [self.most - self.load[rank] for rank in pair]
        return [
            (give, take)
            for give, take in product(*some)
            if give != take and -room[0] <= self.own[give] - self.own[take] <= room[1]
        ]

    def _powers(self, table: IntArray) -> FloatArray:
        found = (table / self.scale + A_SLOT) * (table > 0)
        for _ in range(SQUARINGS):
            found = found * found
        return found


def _root(norms: FloatArray) -> FloatArray:
    for _ in range(SQUARINGS):
        norms = np.sqrt(norms)
    return norms
