"""Microbatches that ranks will have, as far as placing needs to know them.

Ranks run their k-th microbatches together, so what counts besides a rank's sum is whether its k-th
microbatch is as costly as those of the others. Planners pack whole subtrees, the largest first into
the first microbatch with room, and put what several of them need into microbatches above. This
module does the same for all ranks at once, on sums alone, and exchanges items between ranks after
which their microbatches meet better.

The measure of an exchange is the sum over slots of a high norm of the ranks' costs in the slot. A
norm, and not the largest cost itself, because many ranks are near the largest, and lowering one of
them must count. It is computed by multiplications and square roots alone, which every processor
rounds alike.
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
"""Cost of pieces for which there are too few microbatches."""
FloatArray = NDArray[np.float64]


class Pieces(NamedTuple):
    """Subtrees that go into one microbatch each, by the row (a rank or an item) that has them."""

    row: IntArray
    """[P] ascending."""
    tokens: IntArray
    """[P]"""
    cost: IntArray
    """[P]"""

    def table(self, rows: int) -> tuple[IntArray, IntArray]:
        """Tokens and costs of each row's pieces, [rows, P] each, by descending tokens."""
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
        # Nodes of items: what fits is one with all below it.
        node = np.flatnonzero(large | (fits & ~((forest.parent >= 0) & fits[forest.parent])))
        self.node: IntArray = node[np.argsort(items.owner[node], kind="stable")]
        self.begin: IntArray = np.searchsorted(items.owner[self.node], np.arange(len(items) + 1))
        self.tokens: IntArray = np.where(large, forest.length, tokens)[self.node]
        cost = np.where(large, priced.cost, _sums(priced.cost, first, priced.end))
        self.cost: IntArray = cost[self.node]

    def pieces(self, row: IntArray, item: IntArray) -> Pieces:
        """The pieces of each row, whose items those of `item` are that have its number.

        Items of one row that share a segment lie in one subtree, which may be one piece.

        Args:
            row: [n] numbers of rows.
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
        # A row has each segment once. They are in depth-first order: what lies below one follows.
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
    """[n] sums of runs of values."""
    before = np.concatenate([[0], np.cumsum(values)])
    return before[end] - before[begin]


def _spans(begin: IntArray, chosen: IntArray) -> tuple[IntArray, IntArray]:
    """How many entries each of some runs has, and the positions of all of them, run after run.

    Args:
        begin: [n + 1] where each run begins, and the end.
        chosen: [m] runs, in any order.
    """
    counts = begin[chosen + 1] - begin[chosen]
    first = np.repeat(begin[chosen] - np.cumsum(counts) + counts, counts)
    return counts, first + np.arange(len(first))


def packed(tokens: IntArray, cost: IntArray, capacity: int, bins: int | None = None) -> IntArray:
    """[rows, bins] cost of the microbatches of each row (a rank), the first first.

    Args:
        tokens: [rows, P] tokens of each row's pieces, descending; 0 where there is none.
        cost: [rows, P] their costs.
        capacity: tokens of a microbatch.
        bins: how many there may be. What has room in none of them costs TOO_MANY. None: enough,
            as two neighbours hold more than one has room for.
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
        rank: int64 [N] the rank of each.
        capacity: tokens of a microbatch.
    """
    items, every = priced.items(rank, ranks), np.arange(ranks)
    pieces = Cutter(priced, items, capacity).pieces(every, every)
    load, inside = items.whole, np.zeros(ranks, np.int64)
    np.add.at(inside, pieces.row, pieces.cost)
    slowest = packed(*pieces.table(ranks), capacity).max(axis=0)
    overhead = int(priced.rates.token * ROW_TOKENS / priced.rates.unit_cost)
    # What is not in a piece lies in microbatches above.
    return int(slowest.sum() + (load - inside).max()) + overhead * int((slowest > 0).sum())


# Exchanges of items between ranks
# ------------------------------------------------------------

A_SLOT = 0.1
"""A microbatch counts for more than it costs, by this part of the costliest: else what is small is
spread over many ranks, and a last slot for it remains."""
SQUARINGS = 3
"""The norm's exponent is 2 to the power of this."""
MANY_PIECES, MOST_PIECES = 48, 400
"""Ranks with more pieces than the first have many microbatches, most of them full, which leaves
little to gain: fewer pairs are tried. With more than the second, none."""
MOST_ITEMS = 6
"""Items of a rank that are tried, from the smallest to the largest."""
TRIES, FEW_TRIES = 640, 64
"""Pairs of ranks that are tried, and of ranks with many pieces."""
PATIENCE = 30
"""Ranks that one tries to exchange with before it is left as it is."""
WORTH = 0.01
"""Nothing is exchanged where slots cost no more than by this part above the ranks' mean."""
SLACK = 200
"""No exchange fills a rank above the fullest one by more than one part of so many."""


def reshaped(priced: Priced, placement: Placement, capacity: int) -> IntArray:
    """[I] the rank of each item after exchanges that make ranks' microbatches more alike."""
    items, ranks = placement.items, len(placement.load)
    cutter = Cutter(priced, items, capacity)
    pieces = cutter.pieces(placement.rank, np.arange(len(items)))
    most = int(np.bincount(pieces.row, minlength=1).max())
    if ranks == 1 or most > MOST_PIECES:
        return placement.rank
    search = _Exchanges(placement, cutter)
    if search.gains:
        search.run(TRIES if most <= MANY_PIECES else FEW_TRIES)
    return search.rank


class _Exchanges:
    """Items on ranks while they are exchanged, and the ranks' terms of the measure."""

    def __init__(self, placement: Placement, cutter: Cutter) -> None:
        items, self.ranks = placement.items, len(placement.load)
        self.capacity, self.cutter = cutter.capacity, cutter
        self.own: list[int] = [*items.own.tolist(), 0]
        """[I + 1] and of no item, the last."""
        self.none = len(items)
        self.rank, self.load = placement.rank.copy(), placement.load.tolist()
        self.most: int = max(self.load) + max(self.load) // SLACK
        by_size = np.lexsort((items.own, self.rank))
        bounds = np.searchsorted(self.rank[by_size], np.arange(1, self.ranks))
        self.of_rank = [found.tolist() for found in np.split(by_size, bounds)]
        """[R] items of each rank, the smallest first."""
        table = self._packed(self.rank, np.arange(len(items)), self.ranks, None)
        used = table.max(axis=0)
        self.bins = int((used > 0).sum()) + 1
        self.gains: bool = int(used.sum()) * self.ranks > int(table.sum()) * (1 + WORTH)
        """Whether slots cost enough more than what runs in them."""
        self.scale = float(max(1, int(table.max())))
        self.powers = self._powers(table[:, : self.bins])
        self.norms: FloatArray = self.powers.sum(axis=0)

    def run(self, tries: int) -> None:
        """Exchange items of the rank that costs most, until none finds an exchange that helps."""
        failed = np.zeros(self.ranks, np.int64)
        for turn in range(tries):
            # The part of the measure's slope that is each rank's.
            slope = _root(self.norms) / np.maximum(self.norms, 1e-300)
            share = np.where(failed < PATIENCE, (self.powers * slope).sum(axis=1), 0.0)
            worst = int(share.argmax())
            if share[worst] <= 0:
                return
            # Partners in an order of no meaning: what matters is how sizes happen to fit.
            pair = [worst, (worst + 1 + (turn * 7919) % (self.ranks - 1)) % self.ranks]
            if self._exchange(pair):
                failed[pair] = 0
            else:
                failed[worst] += 1

    def _exchange(self, pair: list[int]) -> bool:
        """Make the best exchange between two ranks, if any is better than none."""
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
        table = self._packed(np.asarray(rows), np.asarray(items), len(sides), self.bins)
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
        """Exchanges that fill neither rank too much: items given and taken."""
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

    def _packed(self, row: IntArray, item: IntArray, rows: int, bins: int | None) -> IntArray:
        """[rows, bins] cost of the microbatches of ranks with these items."""
        return packed(*self.cutter.pieces(row, item).table(rows), self.capacity, bins)

    def _powers(self, table: IntArray) -> FloatArray:
        found = (table / self.scale + A_SLOT) * (table > 0)
        for _ in range(SQUARINGS):
            found = found * found
        return found


def _root(norms: FloatArray) -> FloatArray:
    for _ in range(SQUARINGS):
        norms = np.sqrt(norms)
    return norms
