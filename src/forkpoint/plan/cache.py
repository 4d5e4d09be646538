"""Slots of the prefix cache, given by lifetime once the instructions are in order.

A microbatch captures what other microbatches read of it. It takes slots at its forward and gives
them back after its backward. Trunks that another rank sends live from the exchange of caches to
that of gradients. Scores need no other slots: they run in visiting order, where a microbatch's
readers come before all that lies beside them.

Each microbatch takes one run of slots, the first that is free. In the program of one device
microbatches nest, so this is a stack: a path through microbatches of one segment each (a chain, a
prefix and its suffixes) lies in one run, and the cache is as large as what is live at once. In
other orders there may be gaps: a microbatch of n tokens begins at most `live + count * (n - 1)`
slots from the start, where `count` microbatches of `live` tokens in all are live before it.

Layers that attend keep something for every token of a segment, and all microbatches below read it.
Layers that carry a state keep one for the segment's end, which only its own children start from.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

from forkpoint.plan.program import BACKWARD, FORWARD, RETURN, SHARE, Program
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest


def allocate_cache(
    forest: Forest, microbatches: Sequence[Microbatch], program: Program
) -> tuple[tuple[Microbatch, ...], int, int]:
    """Give cache slots to every segment that another microbatch reads.

    Args:
        microbatches: those of the plan, by their index.
        program: their instructions, in the order in which they run.

    Returns:
        The microbatches with `cache_begin` and `state_index` set, and how many slots the cache
        needs for tokens and for states.
    """
    read, forks = captured_segments(forest, microbatches)
    readable = [microbatch for microbatch in microbatches if microbatch.children]
    tokens = {
        m.index: sum(int(forest.length[s]) for s in m.segments if s in read) for m in readable
    }
    states = {m.index: sum(s in forks for s in m.segments) for m in readable}
    begin_of, cache_tokens = _first_fit(tokens, program, microbatches)
    state_of, cache_states = _first_fit(states, program, microbatches)
    placed: list[Microbatch] = []
    for microbatch in microbatches:
        if not microbatch.children:  # none reads it
            placed.append(microbatch)
            continue
        at, state = begin_of.get(microbatch.index, 0), state_of.get(microbatch.index, 0)
        begins, indices = [], []
        for segment in microbatch.segments:
            begins.append(at if segment in read else -1)
            at += int(forest.length[segment]) if segment in read else 0
            indices.append(state if segment in forks else -1)
            state += segment in forks
        found = tuple(begins), tuple(indices)
        if found != (microbatch.cache_begin, microbatch.state_index):
            microbatch = replace(microbatch, cache_begin=found[0], state_index=found[1])
        placed.append(microbatch)
    return tuple(placed), cache_tokens, cache_states


def captured_segments(
    forest: Forest, microbatches: Sequence[Microbatch]
) -> tuple[set[int], set[int]]:
    """Segments that other microbatches attend to, and those among them that have a child there."""
    microbatch_of = {
        s: microbatch.index for microbatch in microbatches for s in microbatch.segments
    }
    parents = forest.parent.tolist()
    forks = {
        parent
        for segment, parent in enumerate(parents)
        if parent >= 0 and microbatch_of[parent] != microbatch_of[segment]
    }
    read = set(forks)
    # A segment above one that is read elsewhere is read by the same microbatches, unless it lies in
    # theirs.
    for segment in forks:
        parent = parents[segment]
        while parent >= 0 and parent not in read:
            read.add(parent)
            parent = parents[parent]
    return read, forks


def _first_fit(
    sizes: Mapping[int, int], program: Program, microbatches: Sequence[Microbatch]
) -> tuple[dict[int, int], int]:
    """The first slot of each microbatch that has some, and how many slots there are."""
    received = [m.index for m in microbatches if m.shared_prompt == "received"]
    slots = _Slots()
    begin_of: dict[int, int] = {}
    for instruction in program.training:
        operation = instruction.operation
        exchanged = received if instruction.exchanges else [instruction.microbatch]
        for microbatch in exchanged:
            size = sizes.get(microbatch, 0)
            if size and operation in (FORWARD, SHARE):
                begin_of[microbatch] = slots.take(size)
            elif size and operation in (BACKWARD, RETURN):
                slots.free(begin_of[microbatch], size)
    return begin_of, slots.most


class _Slots:
    """Slots from 0 on, all of them free at first."""

    def __init__(self) -> None:
        self.most: int = 0
        """One past the last slot that was ever taken."""
        self._top = 0
        """One past the last slot that is taken."""
        self._gaps: list[tuple[int, int]] = []
        """Free runs below, ascending, none next to another."""

    def take(self, size: int) -> int:
        """Take the first free run of this size; returns its first slot."""
        for at, (begin, end) in enumerate(self._gaps):
            if end - begin >= size:
                self._gaps[at : at + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        begin, self._top = self._top, self._top + size
        self.most = max(self.most, self._top)
        return begin

    def free(self, begin: int, size: int) -> None:
        end, at = begin + size, bisect_left(self._gaps, (begin,))
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end = self._gaps.pop(at)[1]
        if at and self._gaps[at - 1][1] == begin:
            at -= 1
            begin = self._gaps.pop(at)[0]
        if end == self._top:
            self._top = begin
        else:
            self._gaps.insert(at, (begin, end))
