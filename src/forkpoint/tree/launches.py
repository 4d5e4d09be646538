"""Which keys each query of a microbatch reads, as launches of variable-length attention.

A launch is a list of sequences whose queries lie back to back in the microbatch and whose keys lie
back to back in one source, which is what every variable-length kernel takes: adjacent cumulative
ranges can neither overlap nor skip. The tables are numpy; the engine turns them into tensors once a
microbatch.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from forkpoint.tree.forest import Forest, IntArray
from forkpoint.tree.microbatch import Microbatch, segment_widths

LAUNCH_COLUMNS: tuple[str, ...] = (
    "source",
    "causal",
    "q_begin",
    "q_end",
    "k_begin",
    "k_end",
    "max_q",
    "max_k",
    "cu_q_at",
    "cu_k_at",
    "count",
)
"""Columns of a table of launches, in order; `AttentionTable.from_numpy` says what they mean."""
FROM_OWN, FROM_CACHE, FROM_GATHER = 0, 1, 2
"""The values of the column `source`: keys of the microbatch, of the cache, or gathered."""


@dataclass(frozen=True)
class Table:
    """Launches of one microbatch's attention.

    `launches` is int64 [n, 11] with the columns of LAUNCH_COLUMNS; `cu` is int32, the cumulative
    lengths that `cu_q_at` and `cu_k_at` point into; `key_index` is int64 [G] for windowed layers,
    entries >= 0 places of the microbatch, entries < 0 cache slot `-1 - entry`.
    """

    launches: IntArray
    cu: NDArray[np.int32]
    key_index: IntArray | None = None


@dataclass(frozen=True)
class _Piece:
    """Some sequences of one launch: queries [q, q + n) read keys [k, k + m)."""

    source: int
    q: int
    n: int
    k: int
    m: int


class VisibleKeys:
    """Runs that each segment of a microbatch reads outside itself, nearest last."""

    def __init__(self, forest: Forest, microbatch: Microbatch, cache_of: dict[int, int]) -> None:
        """`cache_of` maps every segment whose state other microbatches read to its first cache
        place."""
        self.forest: Forest = forest
        self.microbatch: Microbatch = microbatch
        self.begin_of: dict[int, int] = dict(
            zip(microbatch.segments, microbatch.segment_begin, strict=True)
        )
        self.cache_of = cache_of
        self._above: dict[int, tuple[tuple[int, int, int], ...]] = {-1: ()}

    def above(self, segment: int) -> tuple[tuple[int, int, int], ...]:
        """(source, begin, end) of all keys above a segment on its path, root first.

        Contiguous parts, of the microbatch or of the cache, are read as one slice.
        """
        parent = int(self.forest.parent[segment])
        if parent not in self._above:
            chain = []
            while parent not in self._above:
                chain.append(parent)
                parent = int(self.forest.parent[parent])
            for ancestor in reversed(chain):
                self._above[ancestor] = self._extended(self._above[parent], ancestor)
                parent = ancestor
        return self._above[int(self.forest.parent[segment])]

    def _extended(
        self, pieces: tuple[tuple[int, int, int], ...], segment: int
    ) -> tuple[tuple[int, int, int], ...]:
        length = int(self.forest.length[segment])
        source = FROM_OWN if segment in self.begin_of else FROM_CACHE
        begin = (self.begin_of if source == FROM_OWN else self.cache_of)[segment]
        if pieces and pieces[-1][0] == source and pieces[-1][2] == begin:
            return (*pieces[:-1], (source, pieces[-1][1], begin + length))
        return (*pieces, (source, begin, begin + length))


def full_table(forest: Forest, microbatch: Microbatch, cache_of: dict[int, int]) -> Table:
    """Launches of a layer in which every token sees its whole path.

    The first launch is causal over the microbatch's own tokens, by stretches of path; the others
    are unmasked rectangles, one launch for as many neighbouring rectangles as lie back to back on
    both sides.
    """
    reach = VisibleKeys(forest, microbatch, cache_of)
    stretches = _stretches(forest, microbatch)
    causal = [_Piece(FROM_OWN, begin, n, begin, n) for _, begin, n in stretches]
    levels: dict[tuple[int, int], list[_Piece]] = {}
    for segment, begin, n in stretches:
        rank = {FROM_OWN: 0, FROM_CACHE: 0}
        for source, k_begin, k_end in reach.above(segment):
            pieces = levels.setdefault((source, rank[source]), [])
            rank[source] += 1
            last = pieces[-1] if pieces else None
            if last and last.q + last.n == begin and (last.k, last.m) == (k_begin, k_end - k_begin):
                pieces[-1] = _Piece(source, last.q, last.n + n, last.k, last.m)
            else:
                pieces.append(_Piece(source, begin, n, k_begin, k_end - k_begin))
    launches = [(True, causal)]
    for key in sorted(levels):
        launches.extend((False, run) for run in _adjacent_runs(levels[key]))
    return _table(launches)


def _stretches(forest: Forest, microbatch: Microbatch) -> list[tuple[int, int, int]]:
    """(first segment, begin, length) of parts of the microbatch in which each segment follows its
    parent.

    Such a part is one causal sequence: what lies in it before a token is on the token's path. So a
    first child attends to its parent within the causal launch, and needs no rectangle and no merge.
    """
    found: list[tuple[int, int, int]] = []
    before = -1
    for segment, begin, n in zip(
        microbatch.segments,
        microbatch.segment_begin,
        segment_widths(forest, microbatch),
        strict=True,
    ):
        if found and not microbatch.width and int(forest.parent[segment]) == before:
            first, at, length = found[-1]
            found[-1] = first, at, length + n
        else:
            found.append((segment, begin, n))
        before = segment
    return found


def windowed_table(
    forest: Forest, microbatch: Microbatch, cache_of: dict[int, int], window: int
) -> Table:
    """The one launch of a windowed layer.

    Each segment's keys are copied together: the at most `window` - 1 nearest tokens above it on its
    path, then its own. A scalar window argument, aligned to the end, then masks exactly.
    """
    reach = VisibleKeys(forest, microbatch, cache_of)
    pieces, keys, total = [], [], 0
    for segment, begin, n in zip(
        microbatch.segments,
        microbatch.segment_begin,
        segment_widths(forest, microbatch),
        strict=True,
    ):
        tail: list[IntArray] = []
        wanted = window - 1
        for source, k_begin, k_end in reversed(reach.above(segment)):
            if not wanted:
                break
            taken = np.arange(max(k_begin, k_end - wanted), k_end)
            tail.append(taken if source == FROM_OWN else -1 - taken)
            wanted -= len(taken)
        own = np.arange(begin, begin + n)
        gathered = np.concatenate([*reversed(tail), own])
        pieces.append(_Piece(FROM_GATHER, begin, n, total, len(gathered)))
        keys.append(gathered)
        total += len(gathered)
    table = _table([(True, pieces)])
    return Table(table.launches, table.cu, np.concatenate(keys))


def _adjacent_runs(pieces: list[_Piece]) -> list[list[_Piece]]:
    runs: list[list[_Piece]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if last and (last.q + last.n, last.k + last.m) == (piece.q, piece.k):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _table(launches: list[tuple[bool, list[_Piece]]]) -> Table:
    launch_rows, cu, at = [], [], 0
    for causal, pieces in launches:
        count = len(pieces)
        q_lengths, k_lengths = [p.n for p in pieces], [p.m for p in pieces]
        cu.extend(accumulate(q_lengths, initial=0))
        cu.extend(accumulate(k_lengths, initial=0))
        first, last = pieces[0], pieces[-1]
        launch_rows.append(
            (
                first.source,
                int(causal),
                first.q,
                last.q + last.n,
                first.k,
                last.k + last.m,
                max(q_lengths),
                max(k_lengths),
                at,
                at + count + 1,
                count,
            )
        )
        at += 2 * (count + 1)
    return Table(np.asarray(launch_rows, np.int64), np.asarray(cu, np.int32))
