"""Launches of variable-length attention: the keys that each query of a microbatch reads.

A launch is a list of sequences with contiguous queries in the microbatch and contiguous keys in one
source, as variable-length kernels require. The tables are numpy arrays; the engine copies them to
the device once for each microbatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from forkpoint.tree.forest import Forest, IntArray
from forkpoint.tree.microbatch import Microbatch

FROM_OWN, FROM_CACHE, FROM_GATHER = 0, 1, 2
"""Sources of a launch's keys: the microbatch, the prefix cache, or gathered keys."""

LONG_TOKENS = 2048
"""Least length of a causal sequence that is a part of its launch, where FlashAttention-4 is
missing. On an H100 a sequence of 2,100 tokens took 0.39 ms padded on cuDNN and 0.52 on
FlashAttention-2 (forward and backward, heads 16:8 of 128), one of 8,506 tokens 2.24 and 3.98."""
REPEATED_BYTES = 1 << 31
"""Limit of the bytes that a launch's backward takes for gradients of keys and values of every head
of queries. Above it, fewer key heads run at a time, at least one."""
PADDED_STEP_TOKENS = 512
"""Least difference of two padded lengths. Above 8,192 tokens it is a sixteenth of the power of two
below, which pads by 6% at most."""


def padded_length(tokens: int) -> int:
    """The length to which cuDNN's causal attention pads a sequence of at least LONG_TOKENS."""
    step = max(PADDED_STEP_TOKENS, (1 << (tokens.bit_length() - 1)) // 16)
    return -(-tokens // step) * step


class LaunchLayout(NamedTuple):
    """Sequences of one launch, back to back on both sides."""

    source: int
    """FROM_OWN, FROM_CACHE or FROM_GATHER."""
    causal: bool
    """Whether queries attend to keys up to their own position, with the last query at the last key,
    instead of all keys of their sequence."""
    q_begin: int
    k_begin: int
    """Index in the source."""
    q_lengths: tuple[int, ...]
    """Number of queries of each sequence, at least 1."""
    k_lengths: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """Attention launches of one microbatch."""

    launches: tuple[LaunchLayout, ...]
    """The first covers every query of the microbatch, later ones contiguous parts of it. The only
    one with `key_index` is FROM_GATHER."""
    key_index: IntArray | None = None
    """[G] gathered keys, for windowed layers: entries >= 0 are tokens of the microbatch, and others
    are the cache slot `-1 - entry`."""


class _Piece(NamedTuple):
    """One sequence of a launch: queries [q, q + n) read keys [k, k + m)."""

    source: int
    q: int
    n: int
    k: int
    m: int


Runs = tuple[tuple[int, int, int], ...]
"""(source, begin, end) of contiguous keys."""


class CacheSlots(dict[int, int]):
    """The first cache slot of every segment that other microbatches read."""

    def __init__(self, slots: Mapping[int, int] | None = None) -> None:
        super().__init__(slots or {})
        self.runs: dict[int, Runs] = {-1: ()}
        """Keys of a segment and its ancestors, in the cache. Microbatches share them, so that each
        does not look through the whole of a deep tree."""


class VisibleKeys:
    """Runs of keys of ancestors that each segment of a microbatch reads."""

    def __init__(self, forest: Forest, microbatch: Microbatch, cache_of: CacheSlots) -> None:
        self.forest: Forest = forest
        self.begin_of: dict[int, int] = dict(
            zip(microbatch.segments, microbatch.segment_begin, strict=True)
        )
        self.cache_of = cache_of
        self._own: dict[int, Runs] = {}

    def above(self, segment: int) -> Runs:
        """Keys of the ancestors of a segment as (source, begin, end), root first.

        Contiguous keys of one source form one run.
        """
        parent = int(self.forest.parent[segment])
        missing = []
        while (runs := self._known(parent)) is None:
            missing.append(parent)
            parent = int(self.forest.parent[parent])
        for ancestor in reversed(missing):
            own = ancestor in self.begin_of
            source = FROM_OWN if own else FROM_CACHE
            begin = (self.begin_of if own else self.cache_of)[ancestor]
            end = begin + int(self.forest.length[ancestor])
            if runs and runs[-1][0] == source and runs[-1][2] == begin:
                runs = (*runs[:-1], (source, runs[-1][1], end))
            else:
                runs = (*runs, (source, begin, end))
            (self._own if own else self.cache_of.runs)[ancestor] = runs
        return runs

    def _known(self, segment: int) -> Runs | None:
        return (self._own if segment in self.begin_of else self.cache_of.runs).get(segment)


def full_table(forest: Forest, microbatch: Microbatch, cache_of: CacheSlots) -> Table:
    """Launches of a layer in which every token attends to its whole path.

    The first launch is causal, over runs of the microbatch's tokens that are consecutive on a path.
    The others are rectangles without a mask. Neighbouring rectangles form one launch if both their
    queries and their keys are contiguous.
    """
    visible = VisibleKeys(forest, microbatch, cache_of)
    stretches = _stretches(forest, microbatch)
    causal = [_Piece(FROM_OWN, begin, n, begin, n) for _, begin, n in stretches]
    levels: dict[tuple[int, int], list[_Piece]] = {}
    for segment, begin, n in stretches:
        rank = {FROM_OWN: 0, FROM_CACHE: 0}
        for source, k_begin, k_end in visible.above(segment):
            pieces = levels.setdefault((source, rank[source]), [])
            rank[source] += 1
            last = pieces[-1] if pieces else None
            if last and last.q + last.n == begin and (last.k, last.m) == (k_begin, k_end - k_begin):
                pieces[-1] = _Piece(source, last.q, last.n + n, last.k, last.m)
            else:
                pieces.append(_Piece(source, begin, n, k_begin, k_end - k_begin))
    launches = [_launch(True, causal)]
    for key in sorted(levels):
        adjacent: list[list[_Piece]] = []
        for piece in levels[key]:
            last = adjacent[-1][-1] if adjacent else None
            if last and (last.q + last.n, last.k + last.m) == (piece.q, piece.k):
                adjacent[-1].append(piece)
            else:
                adjacent.append([piece])
        launches += [_launch(False, pieces) for pieces in adjacent]
    return Table(tuple(launches))


def _stretches(forest: Forest, microbatch: Microbatch) -> list[tuple[int, int, int]]:
    """Runs of segments in which each follows its parent, as (first segment, begin, length).

    Such a run is one causal sequence, because all earlier tokens of the run are on a token's path.
    So a first child attends to its parent in the causal launch, without a rectangle and a merge.
    """
    found: list[tuple[int, int, int]] = []
    before = -1
    for segment, begin in zip(microbatch.segments, microbatch.segment_begin, strict=True):
        n = int(forest.length[segment])
        if found and int(forest.parent[segment]) == before:
            first, at, length = found[-1]
            found[-1] = first, at, length + n
        else:
            found.append((segment, begin, n))
        before = segment
    return found


def windowed_table(
    forest: Forest,
    microbatch: Microbatch,
    cache_of: CacheSlots,
    window: int,
    *,
    chunked: bool = False,
) -> Table:
    """The one launch of a windowed layer.

    The keys of each segment are gathered: at most the `window` - 1 tokens before it on its path,
    then its own tokens. A kernel's window argument, aligned to the end, then gives the exact mask.

    chunked: whether a token attends only to tokens of its chunk. Chunks begin at multiples of
    `window` on the path, and segments are cut there.
    """
    visible = VisibleKeys(forest, microbatch, cache_of)
    pieces, keys, total = [], [], 0
    for segment, begin in zip(microbatch.segments, microbatch.segment_begin, strict=True):
        start, n = int(forest.start[segment]), int(forest.length[segment])
        cuts = range(-start % window or window, n, window) if chunked else ()
        wanted = start % window if chunked else window - 1
        above = []
        for source, k_begin, k_end in reversed(visible.above(segment)):
            taken = np.arange(max(k_begin, k_end - wanted), k_end)
            above.append(taken if source == FROM_OWN else -1 - taken)
            wanted -= len(taken)
        keys += [*reversed(above), np.arange(begin, begin + n)]
        read = sum(map(len, above))
        for at, end in pairwise((0, *cuts, n)):
            pieces.append(_Piece(FROM_GATHER, begin + at, end - at, total, read + end - at))
            total += read + end - at
            read = 0
    return Table((_launch(True, pieces),), np.concatenate(keys))


def _launch(causal: bool, pieces: list[_Piece]) -> LaunchLayout:
    source, q_begin, _, k_begin, _ = pieces[0]
    lengths = tuple(piece.n for piece in pieces), tuple(piece.m for piece in pieces)
    return LaunchLayout(source, causal, q_begin, k_begin, *lengths)
