"""Exchanges of items between ranks after which their microbatches meet better.

The measure is the sum over slots of a high norm of the ranks' costs in the slot. A norm, and not
the largest cost itself, because many ranks are near the largest, and lowering one of them must
count. It is computed by multiplications and square roots alone, which every processor rounds alike.
"""

from bisect import insort

import numpy as np

from forkpoint.parallel.placement.balance import Placement
from forkpoint.parallel.placement.items import Priced
from forkpoint.parallel.placement.packed import FloatArray, Pieces, bins_needed, packed, table_of
from forkpoint.parallel.placement.rank_pieces import RankPieces
from forkpoint.tree.forest import IntArray

A_SLOT = 0.1
"""A microbatch counts for more than it costs, by this part of the costliest: else what is small is
spread over many ranks, and a last slot for it remains."""
SQUARINGS = 3
"""The norm's exponent is 2 to the power of this."""
MOST_PIECES = 48
"""Microbatches of a rank with more pieces are many and full, which leaves little to gain."""
MOST_ITEMS = 10
"""Items of a rank that are tried, from the smallest to the largest."""
TRIES_A_RANK = 4
LEAST_TRIES, MOST_TRIES = 512, 1280
"""Pairs of ranks that are tried: so many times the number of ranks, within these bounds."""
CHECKS = 3
"""Exchanges of a pair whose ranks' pieces are made anew: others are judged by items alone."""
APART, MOST_AT_ONCE = 40, 12
"""One pair of so many ranks is tried at once, and no more pairs: what is known of others is old
after an exchange, but the numbers of one pair are too few to fill a vector."""
PATIENCE = 30
"""Ranks that one tries to exchange with before it is left as it is."""
WORTH = 0.01
"""Nothing is exchanged where slots cost no more than by this part above the ranks' mean."""
SLACK = 200
"""No exchange fills a rank above the fullest one by more than one part of so many."""


def reshaped(priced: Priced, placement: Placement, capacity: int) -> IntArray:
    """[I] the rank of each item after exchanges that make ranks' microbatches more alike."""
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
        search.run()
    return search.rank


class _Search:
    """Items on ranks while they are exchanged, and the ranks' terms of the measure."""

    def __init__(self, placement: Placement, pieces: Pieces, exact: RankPieces) -> None:
        items, self.ranks = placement.items, len(placement.load)
        self.capacity, self.exact = exact.capacity, exact
        self.own = np.append(items.own, 0)
        """[I + 1] and of no item, the last."""
        self.none = len(items)
        self.rank, self.load = placement.rank.copy(), placement.load.copy()
        self.most = int(self.load.max() + self.load.max() // SLACK)
        self.tokens, self.cost = table_of(pieces.item, pieces, len(items) + 1)
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

    def run(self) -> None:
        """Exchange items of the ranks that cost most, until none finds an exchange that helps."""
        failed, turn = np.zeros(self.ranks, np.int64), 0
        tries = min(max(TRIES_A_RANK * self.ranks, LEAST_TRIES), MOST_TRIES)
        at_once = min(max(1, self.ranks // APART), MOST_AT_ONCE)
        while turn < tries:
            # The part of the measure's slope that is each rank's.
            slope = _root(self.norms) / np.maximum(self.norms, 1e-300)
            share = np.where(failed < PATIENCE, (self.powers * slope).sum(axis=1), 0.0)
            pairs: list[tuple[int, int]] = []
            used: set[int] = set()
            for worst in np.argsort(-share, kind="stable")[:at_once].tolist():
                if share[worst] <= 0 or worst in used or len(used) + 2 > self.ranks:
                    continue
                used.add(worst)
                # Partners in an order of no meaning: what matters is how sizes happen to fit.
                other = (worst + 1 + (turn * 7919) % (self.ranks - 1)) % self.ranks
                while other in used:
                    other = (other + 1) % self.ranks
                used.add(other)
                pairs.append((worst, other))
                turn += 1
            if not pairs:
                return
            done = self._exchange(np.asarray(pairs))
            for (worst, other), made in zip(pairs, done, strict=True):
                if made:
                    failed[worst] = failed[other] = 0
                else:
                    failed[worst] += 1

    def _exchange(self, pairs: IntArray) -> list[bool]:
        """Make the best exchange between two ranks, if any is better than none, for each pair.

        Args:
            pairs: [K, 2] ranks, each in one pair.
        """
        pair, give, take = self._able(pairs)
        done = [False] * len(pairs)
        if not len(pair):
            return done
        a, b = self._terms(pairs, pair, give, take)
        rest = self.norms - self.powers[pairs].sum(axis=1)
        score = _root(np.maximum(rest[pair] + a + b, 0.0)).sum(axis=1)
        hopeful = score < self._least()
        pair, give, take, score = pair[hopeful], give[hopeful], take[hopeful], score[hopeful]
        order = np.lexsort((score, pair))
        bounds = np.searchsorted(pair[order], np.arange(len(pairs) + 1))
        for check in range(CHECKS):
            # The best so far of each pair that has made no exchange.
            some = [at for at, made in enumerate(done) if not made]
            some = [at for at in some if bounds[at] + check < bounds[at + 1]]
            if not some:
                break
            best = order[bounds[some] + check]
            moves = np.stack([give[best], take[best]], axis=1)
            powers = self._after(pairs[some], moves)
            for at, move, after in zip(some, moves.tolist(), powers, strict=True):
                ranks = pairs[at]
                norms = np.maximum(self.norms - self.powers[ranks].sum(axis=0) + after.sum(0), 0.0)
                if _root(norms).sum() < self._least():
                    self._move(move, ranks.tolist())
                    self.powers[ranks] = after
                    self.norms = self.powers.sum(axis=0)
                    done[at] = True
        return done

    def _least(self) -> float:
        return float(_root(self.norms).sum()) * (1 - 1e-6)

    def _move(self, moves: list[int], ranks: list[int]) -> None:
        for item, source, target in zip(moves, ranks, ranks[::-1], strict=True):
            if item != self.none:
                self.rank[item] = target
                self.load[source] -= self.own[item]
                self.load[target] += self.own[item]
                self.of_rank[source].remove(item)
                insort(self.of_rank[target], item, key=self.own.__getitem__)

    def _able(self, pairs: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """[n] exchanges that fill no rank too much: the pair, and the items given and taken."""
        some = np.full((*pairs.shape, MOST_ITEMS + 1), -1)
        for at, rank in np.ndenumerate(pairs):
            items = self.of_rank[rank]
            if len(items) > MOST_ITEMS:
                # Spread over their sizes.
                last = len(items) - 1
                items = [items[place * last // (MOST_ITEMS - 1)] for place in range(MOST_ITEMS)]
            some[at][: len(items) + 1] = [*items, self.none]
        give, take = np.broadcast_arrays(some[:, 0, :, None], some[:, 1, None, :])
        moved = self.own[give] - self.own[take]
        able = (give >= 0) & (take >= 0) & ((give != self.none) | (take != self.none))
        loads = self.load[pairs][:, :, None, None]
        able &= (loads[:, 1] + moved <= self.most) & (loads[:, 0] - moved <= self.most)
        return np.nonzero(able)[0], give[able], take[able]

    def _after(self, pairs: IntArray, moves: IntArray) -> FloatArray:
        """[K, 2, bins] terms of both ranks of pairs after an exchange of an item each."""
        rows: list[int] = []
        items: list[int] = []
        changes = moves.ravel().tolist(), moves[:, ::-1].ravel().tolist()
        for row, (rank, gone, new) in enumerate(zip(pairs.ravel().tolist(), *changes, strict=True)):
            left = [item for item in self.of_rank[rank] if item != gone]
            if new != self.none:
                left.append(new)
            items += left
            rows += [row] * len(left)
        table = self._packed(np.asarray(rows), np.asarray(items), pairs.size, self.bins)
        return self._powers(table).reshape(*pairs.shape, -1)

    def _packed(self, row: IntArray, item: IntArray, rows: int, bins: int | None) -> IntArray:
        """[rows, bins] cost of the microbatches of ranks with these items."""
        pieces = self.exact.of(row, item)
        tokens, cost = table_of(pieces.item, pieces, rows)
        return packed(tokens, cost, self.capacity, bins or bins_needed(tokens, self.capacity))

    def _terms(
        self, pairs: IntArray, pair: IntArray, give: IntArray, take: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """[n, bins] terms of each of two ranks after exchanges of an item each."""
        most = max(len(self.of_rank[rank]) for rank in pairs.ravel()) + 1
        before = np.full((*pairs.shape, most), self.none)
        for at, rank in np.ndenumerate(pairs):
            before[at][: len(self.of_rank[rank])] = self.of_rank[rank]
        items = before[pair].swapaxes(0, 1)
        for side, (gone, new) in enumerate(((give, take), (take, give))):
            items[side][items[side] == gone[:, None]] = self.none
            items[side, :, -1] = new
        rows = 2 * len(pair)
        tokens = self.tokens[items].reshape(rows, -1)
        cost = self.cost[items].reshape(rows, -1)
        # Columns of nothing in any row are left out.
        order = np.argsort(-tokens, axis=1, kind="stable")[:, : int((tokens > 0).sum(axis=1).max())]
        every = np.arange(rows)[:, None]
        table = packed(tokens[every, order], cost[every, order], self.capacity, self.bins)
        powers = self._powers(table)
        return powers[: rows // 2], powers[rows // 2 :]

    def _powers(self, table: IntArray) -> FloatArray:
        found = (table / self.scale + A_SLOT) * (table > 0)
        for _ in range(SQUARINGS):
            found = found * found
        return found


def _root(norms: FloatArray) -> FloatArray:
    for _ in range(SQUARINGS):
        norms = np.sqrt(norms)
    return norms
