"""Assignment of prefix-cache slots by lifetime, after the instructions are ordered.

A microbatch captures data that other microbatches read. It takes slots at its forward and releases
them after its backward. Prompts that another rank sends have slots from the exchange of caches to
the exchange of gradients. A pass of scores uses the same slots, because it runs microbatches in
visiting order, in which the readers of a microbatch come before its siblings.

Each microbatch takes the first free run of slots that is long enough. In the program of one device
microbatches nest, so the slots form a stack. A path through microbatches of one segment each (a
chain, a prefix and its suffixes) has consecutive slots, and the cache has no unused slots. In other
orders there can be gaps: a microbatch of n tokens begins at most `live + count * (n - 1)` slots
from the start, where `count` microbatches of `live` tokens in all are live before it.

Attention layers keep keys and values of every token of a segment, which all microbatches below
read. Layers that carry a state keep one state for the end of a segment, which only the segment's
children read.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from forkpoint.plan.program import BACKWARD, FORWARD, RETURN, SHARE, Program
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest


def allocate_cache(
    forest: Forest, microbatches: Sequence[Microbatch], program: Program
) -> tuple[dict[int, int], int, dict[int, int], int]:
    """Assign cache slots to every segment that another microbatch reads.

    Args:
        microbatches: those of the plan, by their index.
        program: their instructions, in the order in which they run.

    Returns:
        `cache_of`, `cache_tokens`, `state_of` and `cache_states` of the plan.
    """
    microbatch_of = {
        s: microbatch.index for microbatch in microbatches for s in microbatch.segments
    }
    parents = forest.parent.tolist()
    # Segments with a child in another microbatch.
    forks = {
        parent
        for segment, parent in enumerate(parents)
        if parent >= 0 and microbatch_of[parent] != microbatch_of[segment]
    }
    read = set(forks)
    # If other microbatches read a segment, they also read its ancestors, except those in
    # themselves.
    for segment in forks:
        parent = parents[segment]
        while parent >= 0 and parent not in read:
            read.add(parent)
            parent = parents[parent]
    lengths = {segment: int(forest.length[segment]) for segment in read}
    tokens = _first_fit(lengths, program, microbatches)
    states = _first_fit(dict.fromkeys(forks, 1), program, microbatches)
    return *tokens, *states


def _first_fit(
    sizes: Mapping[int, int], program: Program, microbatches: Sequence[Microbatch]
) -> tuple[dict[int, int], int]:
    """The first slot of each segment that needs slots, and the total number of slots.

    `sizes`: number of slots by segment.
    """
    own = {m.index: [s for s in m.segments if s in sizes] for m in microbatches if m.children}
    received = [m.index for m in microbatches if m.shared_prompt == "received"]
    slots = _Slots()
    begin_of: dict[int, int] = {}
    for instruction in program.training:
        operation = instruction.operation
        exchanged = received if instruction.exchanges else [instruction.microbatch]
        for segments in (own.get(microbatch, []) for microbatch in exchanged):
            size = sum(sizes[segment] for segment in segments)
            if size and operation in (FORWARD, SHARE):
                begin = slots.take(size)
                for segment in segments:
                    begin_of[segment] = begin
                    begin += sizes[segment]
            elif size and operation in (BACKWARD, RETURN):
                slots.free(begin_of[segments[0]], size)
    return begin_of, slots.most


class _Slots:
    """Slots numbered from 0. All are free at first."""

    def __init__(self) -> None:
        self.most: int = 0
        """One past the last slot ever taken: the size of the cache."""
        self._top = 0
        """One past the last slot taken at present."""
        self._gaps: list[tuple[int, int]] = []
        """Free runs (begin, end) before `_top`, ascending and not adjacent."""

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
