"""A common forest of slots for ranks whose programs differ: valid, small, and found in time."""

import random
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignments import check, shapes
from forkpoint import PlanError
from forkpoint.plan import align as module
from forkpoint.plan import common_forest
from forkpoint.plan.align import (
    BACKWARD,
    CACHED_ALIGNMENTS,
    FORWARD,
    IDLE,
    RECOMPUTE,
    Alignment,
    align_shapes,
    shape_of,
)
from pairwise import FULL
from random_forests import KINDS, WILD, Shape, plan_of, planned

# Slots over the microbatches of the rank that has most, by ranks.
BARS = {
    "flat": {2: 1.04, 8: 1.06, 32: 1.09},
    "mixed": {2: 1.00, 8: 1.04, 32: 1.05},
    "deep": {2: 1.05, 8: 1.27, 32: 1.36},
    "together": {8: 1.38, 32: 1.61},
}
SETS = {2: 40, 8: 12, 32: 4}
# The same for shapes that the planner made, where two ranks have the least possible. These bars
# are what was found, and a little more.
PLANNED_BARS = {
    "flat": {2: 1.03, 8: 1.09, 32: 1.26},
    "mixed": {2: 1.10, 8: 1.35, 32: 1.72},
    "deep": {2: 1.23, 8: 1.68, 32: 2.30},
}
COLD_MS, WARM_MS = 50.0, 10.0
SLOWER = 6
"""Tests allow for so much slower machines; `python -m benchmarks align` prints the times."""


@st.composite
def ranks(draw: st.DrawFn) -> tuple[list[Shape], list[list[bool]], list[list[float]] | None]:
    """Shapes of 1 to 6 ranks, which microbatches are recomputed, and costs or none."""
    found = draw(st.lists(shapes(), min_size=1, max_size=6))
    rng = random.Random(draw(st.integers(0, 2**32)))
    again = [[rng.random() < 0.3 for _ in shape] for shape in found]
    costs = [[rng.choice((0.0, 1.0, rng.random())) for _ in shape] for shape in found]
    return found, again, costs if draw(st.booleans()) else None


@settings(max_examples=400 if FULL else 150, derandomize=True, deadline=None)
@given(ranks())
def test_all_ranks_run_the_same_operations_around_their_own_programs(drawn) -> None:
    found, again, costs = drawn
    alignment = align_shapes(found, costs, again)
    check(alignment, found, again)
    assert max(map(len, found)) <= len(alignment.parents) <= sum(map(len, set(found)))


@settings(max_examples=200 if FULL else 80, derandomize=True, deadline=None)
@given(ranks())
def test_aligning_aligned_programs_changes_nothing(drawn) -> None:
    found, again, costs = drawn
    alignment = align_shapes(found, costs, again)
    programs = [
        shape_of([(op, slot) for op, slot, _ in alignment.program(rank)])
        for rank in range(len(found))
    ]
    rng = random.Random(len(alignment.parents))
    idle_costs = [[rng.random() for _ in program.parents] for program in programs]
    realigned = align_shapes(
        [program.parents for program in programs],
        idle_costs,
        [program.recomputed for program in programs],
    )
    same = tuple(range(len(alignment.parents)))
    assert realigned.slots == (same,) * len(found)
    assert (realigned.parents, realigned.recomputed) == (alignment.parents, alignment.recomputed)
    assert realigned.digest == alignment.digest


@settings(max_examples=100, derandomize=True, deadline=None)
@given(shapes(), st.integers(1, 5))
def test_ranks_of_one_shape_keep_it(shape: Shape, count: int) -> None:
    alignment = align_shapes([shape] * count)
    assert alignment.parents == shape
    assert alignment.slots == (tuple(range(len(shape))),) * count
    assert alignment.ratio == 1


@settings(max_examples=100, derandomize=True, deadline=None)
@given(ranks(), st.randoms(use_true_random=False))
def test_the_order_of_ranks_has_no_influence(drawn, rng: random.Random) -> None:
    found, again, costs = drawn
    alignment = align_shapes(found, costs, again)
    order = list(range(len(found)))
    rng.shuffle(order)
    shuffled = align_shapes(
        [found[rank] for rank in order],
        None if costs is None else [costs[rank] for rank in order],
        [again[rank] for rank in order],
    )
    assert (shuffled.parents, shuffled.recomputed) == (alignment.parents, alignment.recomputed)
    assert shuffled.slots == tuple(alignment.slots[rank] for rank in order)


def drawn_set(kind: str, count: int, seed: int) -> list[Shape]:
    return [KINDS[kind](random.Random(f"{kind} {count} {seed} {rank}")) for rank in range(count)]


def mean_ratio(kind: str, count: int) -> float:
    sets = [drawn_set(kind, count, seed) for seed in range(SETS[count])]
    return float(np.mean([align_shapes(one).ratio for one in sets]))


@pytest.mark.parametrize(
    ("kind", "count", "bar"),
    [(kind, count, bar) for kind, bars in BARS.items() for count, bar in bars.items()],
)
def test_slots_over_microbatches(kind: str, count: int, bar: float) -> None:
    assert round(mean_ratio(kind, count), 2) <= bar


@pytest.mark.parametrize("kind", PLANNED_BARS)
def test_slots_over_microbatches_of_planned_batches(kind: str) -> None:
    pool = [planned(kind, seed) for seed in range(40)]
    for count, bar in PLANNED_BARS[kind].items():
        ratios, costs = [], []
        for seed in range(SETS[count]):
            chosen = random.Random(seed).sample(pool, count)
            alignment = align_shapes([shape for shape, _ in chosen])
            check(alignment, [shape for shape, _ in chosen])
            tokens = [own for _, own in chosen]
            aware = align_shapes([shape for shape, _ in chosen], tokens)
            ratios.append(alignment.ratio)
            costs.append(aware.cost_ratio(tokens) / alignment.cost_ratio(tokens))
        assert np.mean(ratios) <= bar
        assert np.mean(costs) < 1, "costs that are known must pay"


def test_bars_are_missed_where_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bars can fail: with every merge putting one forest beside the other, all are missed."""
    monkeypatch.setattr(common_forest, "EXACT_ENTRIES", 0)
    monkeypatch.setattr(common_forest, "EXACT_ENTRIES_EACH", 0)
    monkeypatch.setattr(common_forest.Parts, "lay", lambda self, limit: beside(self))
    module._common.cache_clear()
    try:
        for kind, bars in BARS.items():
            assert mean_ratio(kind, 8) > bars[8]
    finally:
        module._common.cache_clear()


def beside(parts) -> common_forest.Laid:
    shape = parts._shape
    return common_forest.Laid([-1] * len(shape), {0: shape.sequence(0, len(shape))})


@pytest.mark.parametrize("damage", ["swapped slots", "other parent", "unused slot", "lost step"])
def test_the_check_finds_damage(damage: str) -> None:
    found = [(-1, 0, 0, -1), (-1, 0, 1)]
    good = align_shapes(found)
    check(good, found)
    parents, recomputed, slots = good.parents, good.recomputed, list(good.slots)
    if damage == "swapped slots":
        slots[0] = (slots[0][1], slots[0][0], *slots[0][2:])
    elif damage == "other parent":
        parents = (-1,) * len(parents)
    elif damage == "unused slot":
        parents, recomputed = (*parents, -1), (*recomputed, False)
    else:
        slots[1] = slots[1][:-1]
    with pytest.raises(AssertionError):
        check(Alignment(parents, recomputed, tuple(slots)), found)


def test_similar_costs_share_slots() -> None:
    # Either of the two small microbatches could lie over the large one.
    alignment = align_shapes([(-1, -1, -1), (-1,)], [[1, 1, 9], [8]])
    assert alignment.slots == ((0, 1, 2), (2,))
    assert alignment.cost_ratio([[1, 1, 9], [8]]) == 1
    alignment = align_shapes([(-1, -1, -1), (-1,)], [[9, 1, 1], [8]])
    assert alignment.slots == ((0, 1, 2), (0,))


def test_recomputed_microbatches_share_slots() -> None:
    shapes_ = [(-1, -1, -1), (-1,)]
    for where in range(3):
        again = [[n == where for n in range(3)], [True]]
        alignment = align_shapes(shapes_, recomputed=again)
        assert alignment.slots == ((0, 1, 2), (where,))
        assert sum(alignment.recomputed) == 1


def test_known_alignments() -> None:
    # A prompt with two, and with three microbatches of responses.
    alignment = align_shapes([(-1, 0, 0), (-1, 0, 0, 0)])
    assert alignment.parents == (-1, 0, 0, 0)
    assert alignment.ratio == 1
    # A rank without microbatches idles all slots, one without a parent runs inside an idle one.
    alignment = align_shapes([(), (-1, 0, 0), (-1, -1)])
    assert alignment.parents == (-1, 0, 0)
    assert alignment.slots == ((), (0, 1, 2), (1, 2))
    assert alignment.microbatches(0) == (IDLE,) * 3
    assert alignment.microbatches(2) == (IDLE, 0, 1)
    assert alignment.program(2) == (
        (FORWARD, 0, IDLE),
        (FORWARD, 1, 0),
        (BACKWARD, 1, 0),
        (FORWARD, 2, 1),
        (BACKWARD, 2, 1),
        (BACKWARD, 0, IDLE),
    )
    assert align_shapes([(), ()]) == Alignment((), (), ((), ()))
    assert align_shapes([()]).ratio == 1
    assert align_shapes([()]).cost_ratio([[]]) == 1


@pytest.mark.parametrize("kind", PLANNED_BARS)
def test_shapes_are_read_from_schedules(kind: str) -> None:
    plan = plan_of(kind, 0)
    microbatches = [
        replace(m, activations="recompute") if m.children else m for m in plan.microbatches
    ]
    program = plan.with_microbatches(microbatches).program
    nesting = shape_of((i.operation, i.microbatch) for i in program.instructions)
    assert nesting.order == tuple(range(len(microbatches)))
    assert nesting.parents == tuple(m.parent for m in microbatches)
    assert nesting.recomputed == tuple(bool(m.children) for m in microbatches)


PRINT_DIGESTS = """
import random
from forkpoint.plan.align import align_shapes
from random_forests import WILD
for kind, draw in WILD.items():
    shapes = [draw(random.Random(f"{kind} {rank}"), 20) for rank in range(6)]
    costs = [[random.Random(f"{rank} {n}").random() for n in range(20)] for rank in range(6)]
    for given in (None, costs):
        alignment = align_shapes(shapes, given)
        print(kind, alignment.digest, alignment.slots)
"""


def test_every_process_finds_the_same() -> None:
    outputs = set()
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", PRINT_DIGESTS],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert outputs.pop().count("\n") == 6


@pytest.mark.parametrize("kind", WILD)
def test_64_programs_of_32_microbatches_are_aligned_in_time(kind: str) -> None:
    found = [WILD[kind](random.Random(f"{kind} {rank}"), 32) for rank in range(64)]
    cold, warm = [], []
    for _ in range(3):
        module._common.cache_clear()
        for times in (cold, warm):
            began = time.process_time()
            alignment = align_shapes(found)
            times.append(1e3 * (time.process_time() - began))
    assert min(cold) < SLOWER * COLD_MS
    assert min(warm) < SLOWER * WARM_MS
    check(alignment, found)


def test_few_alignments_are_remembered() -> None:
    module._common.cache_clear()
    for count in range(1, CACHED_ALIGNMENTS + 10):
        align_shapes([(-1,) * count])
    info = module._common.cache_info()
    assert info.currsize == info.maxsize == CACHED_ALIGNMENTS
    align_shapes([[-1] * 50, np.full(50, -1)])  # ranks, lists and arrays make no difference
    assert module._common.cache_info().hits == 1


NOT_NESTED = "rank 1: microbatch 2 has the parent 0, which is not open"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "there are no shapes"),
        (([(-1,), (-1, -1, 0)],), NOT_NESTED),
        (([(0,)],), "microbatch 0 has the parent 0"),
        (([(-1, 5)],), "microbatch 1 has the parent 5"),
        (([(-2,)],), "microbatch 0 has the parent -2"),
        (([(-1,)], [[1.0], [1.0]]), "costs has 2 entries and there are 1 ranks"),
        (([(-1,)], [[1.0, 2.0]]), "rank 0: costs has 2 entries"),
        (([(-1,)], [[-1.0]]), "the cost of microbatch 0 is -1.0"),
        (([(-1,)], [[float("nan")]]), "the cost of microbatch 0 is nan"),
        (([(-1,)], None, [[]]), "rank 0: recomputed has 0 entries"),
    ],
)
def test_shapes_that_are_refused(arguments, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        align_shapes(*arguments)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ([(FORWARD, 0)], "ends before the backward of microbatch 0"),
        ([(BACKWARD, 0)], "none is open"),
        ([(FORWARD, 0), (FORWARD, 0)], "has run forward before"),
        ([(FORWARD, 0), (FORWARD, 1), (BACKWARD, 0)], "the innermost open one is 1"),
        ([(FORWARD, 0), (RECOMPUTE, 0), (RECOMPUTE, 0)], "which is its second"),
        ([("score", 0)], "operations are 'forward', 'recompute' and 'backward'"),
    ],
)
def test_programs_that_are_refused(program: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        shape_of(program)
