"""Exchanges of items between ranks after which their microbatches meet better.

The measure is the sum over slots of a high norm of the ranks' costs in the slot. A norm, and not
the largest cost itself, because many ranks are near the largest, and lowering one of them must
count. It is computed by multiplications and square roots alone, which every processor rounds alike.
"""

import numpy as np

from forkpoint.forest import IntArray
from forkpoint.placement.balance import Placement
from forkpoint.placement.items import Priced
from forkpoint.placement.packed import FloatArray, Pieces, packed, table_of
from forkpoint.placement.rank_pieces import RankPieces

SQUARINGS = 3
"""The norm's exponent is 2 to the power of this."""
MOST_PIECES = 48
"""Microbatches of a rank with more pieces are many and full, which leaves little to gain."""
MOST_ITEMS = 10
"""Items of a rank that are tried, from the smallest to the largest."""
TRIES_A_RANK = 3
LEAST_TRIES, MOST_TRIES = 256, 768
"""Pairs of ranks that are tried: so many times the number of ranks, within these bounds."""
CHECKS = 3
"""Exchanges of a pair whose ranks' pieces are made anew: others are judged by items alone."""
PATIENCE = 30
"""Ranks that one tries to exchange with before it is left as it is."""
WORTH = 0.01
"""Nothing is exchanged where slots cost no more than by this part above the ranks' mean."""
SLACK = 200
"""No exchange fills a rank above the fullest one by more than one part of so many."""


def reshaped(
    priced: Priced, placement: Placement, capacity: int, most_tries: int = MOST_TRIES
) -> IntArray:
    """[I] the rank of each item after exchanges that make ranks' microbatches more alike.

    At most `most_tries` pairs of ranks are tried.
    """
    items, ranks = placement.items, len(placement.load)
    if ranks == 1:
        return placement.rank
    # A segment that few have is mostly that of one item of its rank: it forks for nobody else.
    alone = np.bincount(items.shared)[items.shared] < ranks
    pieces = Pieces.of(priced, items, alone, capacity)
    if np.bincount(placement.rank[pieces.item], minlength=1).max(initial=0) > MOST_PIECES:
        return placement.rank
    search = _Search(placement, pieces, RankPieces(priced, items, capacity))
    if search.bins > 2 and search.gains:
        search.run(most_tries)
    return search.rank


class _Search:
    """Items on ranks while they are exchanged, and the ranks' terms of the measure."""

    def __init__(self, placement: Placement, pieces: Pieces, exact: RankPieces) -> None:
        items, self.ranks = placement.items, len(placement.load)
        self.capacity, self.own, self.exact = exact.capacity, items.own, exact
        self.rank, self.load = placement.rank.copy(), placement.load.copy()
        self.most = int(self.load.max() + self.load.max() // SLACK)
        self.tokens, self.cost = table_of(pieces.item, pieces, len(items) + 1)
        of_rank = [np.flatnonzero(self.rank == rank).tolist() for rank in range(self.ranks)]
        made = [exact.of(items) for items in of_rank]
        bins = 2 * max(sum(size for size, _ in found) for found in made) // self.capacity + 2
        table = np.asarray([exact.packed(found, bins) for found in made])
        used = table.max(axis=0)
        self.bins = int((used > 0).sum()) + 1
        self.gains: bool = int(used.sum()) * self.ranks > int(table.sum()) * (1 + WORTH)
        """Whether slots cost enough more than what runs in them."""
        self.scale = float(max(1, int(table.max())))
        self.powers = self._powers(table[:, : self.bins])
        self.norms: FloatArray = self.powers.sum(axis=0)

    def run(self, most_tries: int) -> None:
        """Exchange items of the rank that costs most, until none finds an exchange that helps."""
        failed = np.zeros(self.ranks, np.int64)
        for turn in range(min(max(TRIES_A_RANK * self.ranks, LEAST_TRIES), most_tries)):
            # The part of the measure's slope that is each rank's.
            slope = _root(self.norms) / np.maximum(self.norms, 1e-300)
            share = np.where(failed < PATIENCE, (self.powers * slope).sum(axis=1), 0.0)
            worst = int(share.argmax())
            if share[worst] <= 0:
                return
            # Partners in an order of no meaning: what matters is how sizes happen to fit.
            other = (worst + 1 + (turn * 7919) % (self.ranks - 1)) % self.ranks
            if self._exchange(worst, other):
                failed[worst] = failed[other] = 0
            else:
                failed[worst] += 1

    def _exchange(self, worst: int, other: int) -> bool:
        """Make the best exchange between two ranks, if any is better than none."""
        mine, theirs = np.flatnonzero(self.rank == worst), np.flatnonzero(self.rank == other)
        # Item -1 is none.
        give = np.append(self._some(mine), -1)
        take = np.append(self._some(theirs), -1)
        pairs = len(give) * len(take) - 1
        give, take = np.repeat(give, len(take))[:pairs], np.tile(take, len(give))[:pairs]
        moved = np.where(give >= 0, self.own[give], 0) - np.where(take >= 0, self.own[take], 0)
        able = (self.load[other] + moved <= self.most) & (self.load[worst] - moved <= self.most)
        give, take = give[able], take[able]
        if not len(give):
            return False
        a, b = self._terms((mine, theirs), (give, take))
        rest = self.norms - self.powers[worst] - self.powers[other]
        score = _root(np.maximum(rest + a + b, 0.0)).sum(axis=1)
        least = _root(self.norms).sum() * (1 - 1e-6)
        for best in np.argsort(score, kind="stable")[:CHECKS].tolist():
            if not score[best] < least:
                return False
            ranks, moves = (worst, other), (int(give[best]), int(take[best]))
            terms = []
            for items, gone, new in ((mine, *moves), (theirs, *moves[::-1])):
                left = [item for item in items.tolist() if item != gone]
                found = self.exact.of(left + [new] * (new >= 0))
                table = self.exact.packed(found, self.bins)
                terms.append(self._powers(np.asarray(table)))
            if _root(np.maximum(rest + terms[0] + terms[1], 0.0)).sum() < least:
                self._move(moves, ranks)
                self.powers[worst], self.powers[other] = terms
                self.norms = self.powers.sum(axis=0)
                return True
        return False

    def _move(self, moves: tuple[int, int], ranks: tuple[int, int]) -> None:
        for item, source, target in zip(moves, ranks, ranks[::-1], strict=True):
            if item >= 0:
                self.rank[item] = target
                self.load[source] -= self.own[item]
                self.load[target] += self.own[item]

    def _some(self, items: IntArray) -> IntArray:
        """At most MOST_ITEMS of these, spread over their sizes."""
        if len(items) <= MOST_ITEMS:
            return items
        by_size = items[np.argsort(self.own[items], kind="stable")]
        return by_size[np.arange(MOST_ITEMS) * (len(items) - 1) // (MOST_ITEMS - 1)]

    def _terms(
        self, of_ranks: tuple[IntArray, IntArray], moves: tuple[IntArray, IntArray]
    ) -> tuple[FloatArray, FloatArray]:
        """[n, bins] terms of each of two ranks after exchanges of an item each."""
        most = max(map(len, of_ranks)) + 1
        items = np.full((2, len(moves[0]), most), len(self.tokens) - 1)
        for side, (own, gone, new) in enumerate(zip(of_ranks, moves, moves[::-1], strict=True)):
            items[side, :, : len(own)] = np.where(own == gone[:, None], items[side, :, :1], own)
            items[side, :, -1] = new
        # Item -1, the last row, has no pieces.
        rows = 2 * len(moves[0])
        tokens = self.tokens[items].reshape(rows, -1)
        cost = self.cost[items].reshape(rows, -1)
        # Columns of nothing in any row are left out.
        order = np.argsort(-tokens, axis=1, kind="stable")[:, : int((tokens > 0).sum(axis=1).max())]
        every = np.arange(rows)[:, None]
        table = packed(tokens[every, order], cost[every, order], self.capacity, self.bins)
        powers = self._powers(table)
        return powers[: rows // 2], powers[rows // 2 :]

    def _powers(self, table: IntArray) -> FloatArray:
        found = table / self.scale
        for _ in range(SQUARINGS):
            found = found * found
        return found


def _root(norms: FloatArray) -> FloatArray:
    for _ in range(SQUARINGS):
        norms = np.sqrt(norms)
    return norms
