"""Microbatches that ranks will have, as far as placing needs to know them.

Ranks run their k-th microbatches together, so what counts besides a rank's sum is whether its k-th
microbatch is as costly as those of the others. Planners pack whole subtrees, the largest first into
the first microbatch with room, and put what several of them need into microbatches above. This
module does the same for all ranks at once, on sums alone.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forkpoint.parallel.placement.items import Items, Priced
from forkpoint.plan.pricing.meters import ROW_TOKENS
from forkpoint.tree.forest import IntArray

TOO_MANY = 1 << 56
"""Cost of pieces for which there are too few microbatches."""
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Subtrees that go into one microbatch each, by the item that they belong to."""

    item: IntArray
    """[P] the item of each piece, ascending."""
    tokens: IntArray
    """[P]"""
    cost: IntArray
    """[P]"""

    @classmethod
    def of(cls, priced: Priced, items: Items, alone: NDArray[np.bool_], capacity: int) -> "Pieces":
        """The largest subtrees of each item that fit in a microbatch.

        A segment that an item shares counts as the item's own where no other item of its rank has
        it: there it forks for nobody else.

        Args:
            priced: the rollouts.
            items: sets of them.
            alone: for each item, for each of its shared segments: whether no other item of its rank
                has it.
            capacity: tokens of a microbatch.
        """
        # Nodes: segments of one item, then a copy of each shared segment for each item.
        private = np.flatnonzero(items.owner >= 0)
        copies = items.shared_segment[items.shared]
        copied = np.repeat(np.arange(len(items)), np.diff(items.begin))
        segment = np.concatenate([private, copies])
        return largest_subtrees(
            priced,
            np.concatenate([items.owner[private], copied]),
            segment,
            (priced.forest.length[segment], priced.cost[segment]),
            capacity,
            np.concatenate([np.ones(len(private), bool), alone]),
        )


def largest_subtrees(
    priced: Priced,
    row: IntArray,
    segment: IntArray,
    sizes: tuple[IntArray, IntArray],
    capacity: int,
    able: NDArray[np.bool_] | None = None,
) -> Pieces:
    """The largest subtrees of each row's nodes that fit in a microbatch; a row is their item.

    Args:
        priced: the rollouts.
        row: [n] the row of each node.
        segment: [n] its segment, whose parent is another node of the row or a root's. A row's nodes
            of one segment are the same node.
        sizes: [n] each, its own tokens and cost.
        capacity: tokens of a microbatch.
        able: [n] whether a node may be in a piece; None is all.
    """
    size = max(1, len(priced.forest))
    key = row * size + segment
    order = np.argsort(key, kind="stable")
    key = key[order]
    if len(key):
        once = np.concatenate([[True], key[1:] != key[:-1]])
        order, key = order[once], key[once]
    row, segment = row[order], segment[order]
    # Segments are in depth-first order: what lies below one follows it.
    end = np.searchsorted(key, row * size + priced.end[segment])
    own = np.stack([sizes[0][order], sizes[1][order]])
    before = np.concatenate([np.zeros((2, 1), np.int64), np.cumsum(own, axis=1)], axis=1)
    tokens, cost = before[:, end] - before[:, :-1]
    fits = tokens <= capacity
    if able is not None:
        fits &= able[order]
    parent = priced.forest.parent[segment]
    above = np.searchsorted(key, row * size + parent)
    tops = np.flatnonzero(fits & ~((parent >= 0) & fits[np.minimum(above, len(key) - 1)]))
    return Pieces(row[tops], tokens[tops], cost[tops])


def packed(tokens: IntArray, cost: IntArray, capacity: int, bins: int) -> IntArray:
    """[rows, bins] cost of the microbatches of each row (a rank), the first first.

    Args:
        tokens: [rows, P] tokens of each row's pieces, descending; 0 where there is none.
        cost: [rows, P] their costs.
        capacity: tokens of a microbatch.
        bins: how many there may be. What has room in none of them costs TOO_MANY.
    """
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


def table_of(row: IntArray, pieces: Pieces, rows: int) -> tuple[IntArray, IntArray]:
    """Tokens and costs of each row's pieces, [rows, P] each, by descending tokens.

    Args:
        row: [n] the row of each piece.
        pieces: n of them.
        rows: how many rows there are.
    """
    order = np.lexsort((-pieces.cost, -pieces.tokens, row))
    row = row[order]
    counts = np.bincount(row, minlength=rows)
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens, cost = np.zeros((2, rows, int(counts.max(initial=0))), np.int64)
    tokens[row, place], cost[row, place] = pieces.tokens[order], pieces.cost[order]
    return tokens, cost


def bins_needed(tokens: IntArray, capacity: int) -> int:
    """A bound on the microbatches of any row: two neighbours hold more than one has room for."""
    return int(2 * tokens.sum(axis=1).max(initial=0) // capacity) + 2


def lockstep_cost(priced: Priced, rank: IntArray, ranks: int, capacity: int) -> int:
    """Predicted cost of a step in which ranks run their microbatches in lockstep.

    Args:
        priced: the rollouts.
        rank: int64 [N] the rank of each.
        ranks: how many there are.
        capacity: tokens of a microbatch.
    """
    items = priced.items(rank, ranks)
    alone = np.ones(len(items.shared), bool)
    pieces = Pieces.of(priced, items, alone, capacity)
    load, inside = items.whole, np.zeros(ranks, np.int64)
    np.add.at(inside, pieces.item, pieces.cost)
    tokens, cost = table_of(pieces.item, pieces, ranks)
    slowest = packed(tokens, cost, capacity, bins_needed(tokens, capacity)).max(axis=0)
    overhead = int(priced.rates.token * ROW_TOKENS / priced.rates.unit_cost)
    # What is not in a piece lies in microbatches above.
    return int(slowest.sum() + (load - inside).max()) + overhead * int((slowest > 0).sum())
