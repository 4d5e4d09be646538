"""Rules of an alignment, checked without the code that makes it; and shapes to draw."""

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from forkpoint.plan.align import BACKWARD, FORWARD, IDLE, RECOMPUTE, Alignment, shape_of
from random_forests import Shape


@st.composite
def shapes(draw: st.DrawFn, *, least: int = 0, most: int = 12) -> Shape:
    """`least` to `most` microbatches, each inside of any that is open when it starts."""
    parents: list[int] = []
    path = [-1]
    for node in range(draw(st.integers(least, most))):
        del path[draw(st.integers(1, len(path))) :]
        parents.append(path[-1])
        path.append(node)
    return tuple(parents)


def program_of(parents: Sequence[int], recomputed: Sequence[bool]) -> list[tuple[str, int]]:
    """The program of a shape, written without what is under test."""
    steps: list[tuple[str, int]] = []

    def run(node: int) -> None:
        steps.append((FORWARD, node))
        for child in range(node + 1, len(parents)):
            if parents[child] == node:
                run(child)
        if recomputed[node]:
            steps.append((RECOMPUTE, node))
        steps.append((BACKWARD, node))

    for node, parent in enumerate(parents):
        if parent < 0:
            run(node)
    return steps


def check(
    alignment: Alignment,
    given_shapes: Sequence[Sequence[int]],
    recomputed: Sequence[Sequence[bool]] | None = None,
) -> None:
    """Every rank runs the same operations, nested, with its own microbatches as it ordered them."""
    again = recomputed or [[False] * len(shape) for shape in given_shapes]
    used: set[int] = set()
    asked: set[int] = set()
    assert len(alignment.slots) == len(given_shapes)
    for rank, shape in enumerate(given_shapes):
        steps = alignment.program(rank)
        assert tuple((step.operation, step.slot) for step in steps) == alignment.operations
        slots = alignment.slots[rank]
        assert len(set(slots)) == len(slots) == len(shape)
        used.update(slots)
        asked.update(slot for slot, value in zip(slots, again[rank], strict=True) if value)
        for step in steps:
            assert step.microbatch == (slots.index(step.slot) if step.slot in slots else IDLE)
        # What is left without idle steps is the rank's own program.
        twice = [alignment.recomputed[slot] for slot in slots]
        own = [(op, microbatch) for op, _, microbatch in steps if microbatch != IDLE]
        assert own == program_of(shape, twice)
    assert used == set(range(len(alignment.parents)))
    assert asked == {slot for slot, value in enumerate(alignment.recomputed) if value}
    nesting = shape_of(alignment.operations)
    assert nesting.order == tuple(range(len(alignment.parents)))
    assert (nesting.parents, nesting.recomputed) == (alignment.parents, alignment.recomputed)


def check_held(forest: Sequence[int], shape: Sequence[int], slots: Sequence[int]) -> None:
    """A shape lies in a forest: in order, and below what it is below."""
    assert all(a < b for a, b in itertools.pairwise(slots))
    node_of = {slot: node for node, slot in enumerate(slots)}
    nearest = [-1] * (len(forest) + 1)  # the nearest ancestor that the shape uses
    for slot, parent in enumerate(forest):
        nearest[slot] = node_of.get(parent, nearest[parent])
    assert [nearest[slot] for slot in slots] == list(shape)
