"""Initial states of a microbatch's segments, in layers that carry a state along the path.

A linear-attention layer reads two things from earlier tokens: a state of fixed size, and the last
inputs of its short convolution. Both are taken at the end of a segment, and the children of the
segment start from them. In one microbatch, segments run level by level. Other microbatches read
them from the prefix cache. All arrays are numpy; the engine copies them to the device once for each
microbatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from forkpoint.tree.forest import Forest, IntArray
from forkpoint.tree.microbatch import Microbatch

NOTHING = -1
"""Entry of `ConvolutionLayout.window` before the first token of a rollout, where inputs are
zero."""


@dataclass(frozen=True, eq=False)
class Level:
    """Segments of a microbatch at one depth in it. They start from final states of the level
    above."""

    begin: IntArray
    """[S] place of the first token of each segment, ascending."""
    length: IntArray
    """[S]"""
    parent: IntArray
    """[S] index of the parent in the level above. At the first level: state slot, or -1 for
    none."""
    kept: IntArray
    """Indices of the segments of this level whose final state other microbatches read."""
    final: bool
    """Whether anything reads a final state of this level."""


@dataclass(frozen=True, eq=False)
class StateLayout:
    """The levels of one microbatch, and the slots of the states that it keeps."""

    levels: tuple[Level, ...]
    kept_index: IntArray
    """[K] state slots of the kept states, level by level."""


@dataclass(frozen=True, eq=False)
class ConvolutionLayout:
    """Inputs that a causal convolution of `width` reads from before the segment of a place.

    Entries of `window` and `tail` are places of the microbatch, NOTHING, or -2 - i for input i of
    the cache. The cache has `width` - 1 inputs for every state slot, oldest first.
    """

    places: IntArray
    """[F] places with inputs outside of their segment."""
    window: IntArray
    """[F, width] inputs of each of these places, oldest first."""
    tail: IntArray
    """[K, width - 1] last inputs of every kept segment, in the order of `kept_index`."""


def state_layout(
    forest: Forest, microbatch: Microbatch, state_of: Mapping[int, int]
) -> StateLayout:
    """Levels of a microbatch. `state_of`: state slots of segments whose final state is kept."""
    levels: list[Level] = []
    kept_index: list[int] = []
    above: dict[int, int] = {}
    members = _by_level(forest, microbatch)
    for number, of_level in enumerate(members, 1):
        segments = [microbatch.segments[i] for i in of_level]
        parents = forest.parent[segments].tolist()
        parent = [above[p] if above else state_of[p] if p >= 0 else -1 for p in parents]
        kept = [i for i, s in enumerate(segments) if s in state_of]
        kept_index += [state_of[segments[i]] for i in kept]
        above = {s: i for i, s in enumerate(segments)}
        levels.append(
            Level(
                begin=np.asarray([microbatch.segment_begin[i] for i in of_level], np.int64),
                length=forest.length[segments],
                parent=np.asarray(parent, np.int64),
                kept=np.asarray(kept, np.int64),
                final=bool(kept) or number < len(members),
            )
        )
    return StateLayout(tuple(levels), np.asarray(kept_index, np.int64))


def convolution_layout(
    forest: Forest, microbatch: Microbatch, state_of: Mapping[int, int], width: int
) -> ConvolutionLayout:
    """Inputs before each segment on its path, as far as a convolution reaches."""
    before = width - 1
    ends: dict[int, IntArray] = {}
    places, windows, kept = [], [], []
    for members in _by_level(forest, microbatch):
        for i in members:
            segment, begin = microbatch.segments[i], microbatch.segment_begin[i]
            length, parent = int(forest.length[segment]), int(forest.parent[segment])
            if parent in ends:
                start = ends[parent]
            elif parent >= 0:
                start = -2 - (state_of[parent] * before + np.arange(before))
            else:
                start = np.full(before, NOTHING, np.int64)
            own = np.arange(begin, begin + length)
            reach = np.concatenate([start, own])
            ends[segment] = reach[length:]
            if segment in state_of:
                kept.append(ends[segment])
            first = min(before, length)
            places.append(own[:first])
            windows.append(np.lib.stride_tricks.sliding_window_view(reach, width)[:first])
    return ConvolutionLayout(
        np.concatenate(places),
        np.concatenate(windows),
        np.stack(kept) if kept else np.zeros((0, before), np.int64),
    )


def _by_level(forest: Forest, microbatch: Microbatch) -> list[list[int]]:
    """Positions in the microbatch of the segments at each depth, in the order of their places."""
    depth: dict[int, int] = {}
    levels: list[list[int]] = []
    order = sorted(range(len(microbatch.segments)), key=lambda i: microbatch.segments[i])
    for i in order:  # parents have smaller numbers than their children
        segment = microbatch.segments[i]
        level = depth[segment] = depth.get(int(forest.parent[segment]), -1) + 1
        if level == len(levels):
            levels.append([])
        levels[level].append(i)
    return [sorted(level, key=lambda i: microbatch.segment_begin[i]) for level in levels]
