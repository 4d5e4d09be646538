"""One common shape for ranks whose programs differ: valid, small, and the same everywhere."""

import itertools
import random
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint import PlanError
from forkpoint.plan.align import SLOT_COST, align, common_forest, nodes_of
from forkpoint.plan.program import (
    BACKWARD,
    BLOCKS,
    BOUNDARY,
    ENDS,
    FORWARD,
    HEAD,
    IDLE,
    RECOMPUTE,
    SCORE,
    Instruction,
    Program,
)
from programs import equal_costs

Shape = tuple[int, ...]
"""Parents of microbatches in order of their forwards, -1 for none."""


def drawn_shape(rng: random.Random) -> Shape:
    """A few groups, one prompt with many leaves, or a dialogue whose turns have up to two more."""
    kind = rng.choice(("flat", "mixed", "deep"))
    if kind == "mixed":
        return (-1, *[0] * rng.randint(4, 16))
    parents: list[int] = []
    above = -1
    for _ in range(rng.randint(3, 6) if kind == "flat" else rng.randint(2, 4)):
        node = len(parents)
        below = rng.randint(3, 4) if kind == "flat" else rng.randint(0, 2)
        parents += [above] + [node] * below
        above = node if kind == "deep" else -1
    return tuple(parents)


@st.composite
def shapes(draw: st.DrawFn, *, most: int = 12) -> Shape:
    """Up to `most` microbatches, each inside of any that is open when it starts."""
    parents: list[int] = []
    path = [-1]
    for node in range(draw(st.integers(0, most))):
        del path[draw(st.integers(1, len(path))) :]
        parents.append(path[-1])
        path.append(node)
    return tuple(parents)


def program_of(
    parents: Sequence[int],
    recomputed: Sequence[bool],
    scored: bool = False,
    ends: Sequence[str] | None = None,
    early: str = BOUNDARY,
) -> Program:
    """The program of a shape, written without what is under test."""
    steps: list[Instruction] = []
    ends = ends or [HEAD] * len(parents)
    if scored:
        steps += [Instruction(SCORE, n, n, ends[n], False) for n in range(len(parents))]

    def run(node: int) -> None:
        end = early if recomputed[node] else ends[node]
        steps.append(Instruction(FORWARD, node, node, end, not recomputed[node]))
        for child in range(node + 1, len(parents)):
            if parents[child] == node:
                run(child)
        if recomputed[node]:
            steps.append(Instruction(RECOMPUTE, node, node, ends[node]))
        steps.append(Instruction(BACKWARD, node, node))

    for node, parent in enumerate(parents):
        if parent < 0:
            run(node)
    return Program(tuple(steps))


@st.composite
def ranks(draw: st.DrawFn) -> tuple[list[Program], list[list[float]]]:
    """Programs of 1 to 6 ranks, and their costs."""
    found = draw(st.lists(shapes(), min_size=1, max_size=6))
    rng = random.Random(draw(st.integers(0, 2**32)))
    early = draw(st.sampled_from((BOUNDARY, BLOCKS)))
    programs = [
        program_of(
            shape,
            [rng.random() < 0.3 for _ in shape],
            rng.random() < 0.3,
            # A host that cannot leave the last block early runs every head.
            [rng.choice((BOUNDARY, HEAD)) if early == BOUNDARY else HEAD for _ in shape],
            early,
        )
        for shape in found
    ]
    costs = [[rng.choice((0.0, 1.0, rng.random())) for _ in shape] for shape in found]
    return programs, costs if draw(st.booleans()) else equal_costs(programs)


def check(aligned: Sequence[Program], programs: Sequence[Program]) -> None:
    """Every rank runs the same operations, nested, with its microbatches as it ordered them."""
    common = [i._replace(microbatch=IDLE) for i in aligned[0].instructions]
    for program in aligned:
        assert [i._replace(microbatch=IDLE) for i in program.instructions] == common
    again = {i.slot for i in common if i.operation == RECOMPUTE}
    asked: set[int] = set()
    used: set[int] = set()
    for program, own in zip(aligned, programs, strict=True):
        slot_of = {i.microbatch: i.slot for i in program.training if not i.idle}
        used |= set(slot_of.values())
        asked |= {slot_of[i.microbatch] for i in own.training if i.operation == RECOMPUTE}
        # What is left without idle steps is the rank's program, and what others compute again.
        left = [(i.operation, i.microbatch) for i in program.training if not i.idle]
        parents = [node.parent for node in nodes_of(own)]
        recomputed = [slot_of[m] in again for m in range(len(parents))]
        wanted = program_of(parents, recomputed)
        assert left == [(i.operation, i.microbatch) for i in wanted.instructions]
        assert [i.microbatch for i in program.scores if not i.idle] == [
            i.microbatch for i in own.scores
        ]
    assert used == {i.slot for i in common if i.operation == FORWARD}
    assert asked == again
    check_ends(aligned, programs)
    nodes_of(aligned[0])


def check_ends(aligned: Sequence[Program], programs: Sequence[Program]) -> None:
    """A forward goes as far as any rank needs in its slot."""
    late = any(i.ends_at == BLOCKS for program in programs for i in program.training)
    ends: dict[tuple[str, int], set[str]] = {}
    again: set[int] = set()
    for program, own in zip(aligned, programs, strict=True):
        slot_of = {(i.operation == SCORE, i.microbatch): i.slot for i in program.instructions}
        for i in own.instructions:
            slot = slot_of[i.operation == SCORE, i.microbatch]
            # Of two forwards the second one is that of the backward.
            kind = FORWARD if i.operation == RECOMPUTE else i.operation
            if i.keeps_graph or kind == SCORE:
                ends.setdefault((kind, slot), set()).add(i.ends_at)
            again |= {slot} if i.operation == RECOMPUTE else set()
    for i in aligned[0].instructions:
        first = i.operation == FORWARD and i.slot in again
        kind = FORWARD if i.operation == RECOMPUTE else i.operation
        needed = max(ends[kind, i.slot], key=ENDS.index)
        assert i.ends_at == (needed if not first else BLOCKS if late else BOUNDARY)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(ranks(), st.randoms(use_true_random=False))
def test_ranks_run_the_same_operations_around_their_programs(drawn, rng: random.Random) -> None:
    programs, costs = drawn
    aligned = align(programs, costs)
    check(aligned, programs)
    slots = sum(i.operation == FORWARD for i in aligned[0].instructions)
    counts = {tuple(n.parent for n in nodes_of(program)) for program in programs}
    assert max(map(len, counts)) <= slots <= sum(map(len, counts))
    # The order of ranks has no influence, and aligned programs stay as they are.
    order = list(range(len(programs)))
    rng.shuffle(order)
    shuffled = align(
        [programs[rank] for rank in order],
        [costs[rank] for rank in order],
    )
    assert shuffled == tuple(aligned[rank] for rank in order)
    assert align(aligned, equal_costs(aligned)) == aligned


def unit(found: Sequence[Shape]) -> list[list[float]]:
    return [[1.0] * len(shape) for shape in found]


def held(forest: Sequence[int], shape: Sequence[int], slots: Sequence[int]) -> bool:
    """Whether a shape lies in a forest: in order, and below what it is below."""
    node_of = {slot: node for node, slot in enumerate(slots)}
    nearest = [-1] * (len(forest) + 1)  # the nearest ancestor that the shape uses
    for slot, parent in enumerate(forest):
        nearest[slot] = node_of.get(parent, nearest[parent])
    rising = all(a < b for a, b in itertools.pairwise(slots))
    return rising and [nearest[slot] for slot in slots] == list(shape)


def greatest_saving(one: Shape, other: Shape, costs: list[list[float]]) -> float:
    """The recurrence of `merged` as a recursion over lists of trees."""

    def children(parents: Shape, node: int) -> tuple[int, ...]:
        return tuple(child for child, parent in enumerate(parents) if parent == node)

    def most(trees: tuple[int, ...], others: tuple[int, ...]) -> float:
        if not trees or not others:
            return 0.0
        i, j = trees[0], others[0]
        below, below_j = children(one, i), children(other, j)
        return max(
            min(costs[0][i], costs[1][j])
            + SLOT_COST
            + (most(below, below_j) + most(trees[1:], others[1:])),
            most(trees[1:], others),
            most(trees, others[1:]),
            most(below, others),
            most(trees, below_j),
        )

    return most(children(one, -1), children(other, -1))


@settings(max_examples=20, derandomize=True, deadline=None)
@given(shapes(most=6), shapes(most=6), st.randoms(use_true_random=False))
def test_two_shapes_lie_over_each_other_for_the_greatest_saving(
    one: Shape, other: Shape, rng: random.Random
) -> None:
    costs = [[rng.random() for _ in shape] for shape in (one, other)]
    if one == other:
        costs[1] = costs[0]
    parents, slots = common_forest([one, other], costs)
    for shape in (one, other):
        assert held(parents, shape, slots[shape])
    both = set(slots[one]) & set(slots[other])
    of_slot = [
        dict(zip(slots[s], c, strict=True)) for s, c in zip((one, other), costs, strict=True)
    ]
    saved = sum(min(of_slot[0][slot], of_slot[1][slot]) + SLOT_COST for slot in both)
    assert saved == pytest.approx(greatest_saving(one, other, costs))


@pytest.mark.parametrize(("ranks", "sets", "bar"), [(8, 8, 1.32), (32, 3, 1.35)])
def test_slots_over_microbatches(ranks: int, sets: int, bar: float) -> None:
    """Over those of the rank that has most: found, and a little more."""
    ratios = []
    for seed in range(sets):
        found = [drawn_shape(random.Random(f"{ranks} {seed} {rank}")) for rank in range(ranks)]
        ratios.append(len(common_forest(found, unit(found))[0]) / max(map(len, found)))
    assert np.mean(ratios) <= bar


def slots_of(programs: Sequence[Program], costs: Sequence[Sequence[float]]) -> list[int]:
    """The slots of the last rank's microbatches."""
    own = align(programs, costs)[-1]
    return [i.slot for i in own.training if i.operation == FORWARD and not i.idle]


def test_similar_costs_share_slots_and_so_do_recomputed_microbatches() -> None:
    three, one = program_of((-1, -1, -1), [False] * 3), program_of((-1,), [False])
    for where in range(3):
        costs = [[9.0 if n == where else 1.0 for n in range(3)], [8.0]]
        assert slots_of([three, one], costs) == [where]
        again = program_of((-1, -1, -1), [n == where for n in range(3)])
        programs = [again, program_of((-1,), [True])]
        assert slots_of(programs, equal_costs(programs)) == [where]


LARGE: dict[str, list[Shape]] = {
    "alone": [(-1,) * count for count in (600, 590, 1)],
    "one group": [(-1, *[0] * count) for count in (600, 590, 3)],
    "chains": [tuple(range(-1, count)) for count in (600, 590, 2)],
    "groups": [tuple(n - n % size if n % size else -1 for n in range(500)) for size in (4, 5, 7)],
    "64 ranks": [drawn_shape(random.Random(seed)) for seed in range(64)],
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_shapes_are_aligned_in_time(kind: str) -> None:
    began = time.process_time()
    parents, slots = common_forest(LARGE[kind], unit(LARGE[kind]))
    assert time.process_time() - began < 5
    assert all(held(parents, shape, own) for shape, own in slots.items())
    if kind in ("alone", "one group", "chains"):
        assert len(parents) == max(map(len, LARGE[kind]))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([(FORWARD, 0)], "ends before the backward of slot 0"),
        ([(BACKWARD, 0)], "not the innermost open one"),
        ([(FORWARD, 0), (FORWARD, 1), (BACKWARD, 0)], "not the innermost open one"),
    ],
)
def test_programs_that_are_not_nested(steps: list[tuple[str, int]], message: str) -> None:
    program = Program(tuple(Instruction(operation, slot, slot) for operation, slot in steps))
    with pytest.raises(PlanError, match=message):
        align([program], equal_costs([program]))
