"""Stages of a pipeline: cuts of layers, orders of each stage, and the lower bound."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from benchmarks.planning.stage_bound import lower_bound
from benchmarks.planning.stages import dense_1f1b, three_barriers
from forkpoint import Config, RolloutBatch
from forkpoint.errors import PlanError
from forkpoint.plan import MODELS, ModelShape, Plan, make_plan
from forkpoint.plan.pipeline import StageSchedule, StageWork, order_stages
from forkpoint.plan.pricing.meters import meter_of
from forkpoint.plan.program import BACKWARD, BLOCKS, FORWARD
from forkpoint.plan.stages import cut_layers, schedule_stages, stage_plan, stage_prices, stage_work
from forkpoint.rollouts.synthetic import synthetic_rollouts
from programs import check_program

SHAPE = ModelShape.from_config(MODELS["qwen3-0.6b"])


def work_of(parents: Sequence[int], stages: int, costs: Sequence[float] | None = None) -> StageWork:
    """Each forward takes its cost, each backward twice that; each slot holds a byte."""
    forward = np.tile([1.0] * len(parents) if costs is None else costs, (stages, 1))
    return StageWork(
        tuple(parents), forward, 2 * forward, np.ones_like(forward), np.zeros_like(forward)
    )


def drawn(seed: int, slots: int, stages: int) -> StageWork:
    rng = random.Random(seed)
    parents: list[int] = []
    path: list[int] = [-1]
    for slot in range(slots):
        del path[rng.randint(1, len(path)) :]
        parents.append(path[-1])
        path.append(slot)
    return work_of(parents, stages, [rng.uniform(0.2, 3) for _ in parents])


def words(schedule: StageSchedule) -> list[str]:
    return [" ".join("fb"[back] + str(slot) for slot, back in o) for o in schedule.orders]


def replayed(work: StageWork, schedule: StageSchedule) -> float:
    """When the last stage ends if each runs its order, from what must come before alone."""
    ends: dict[tuple[int, int, bool], float] = {}
    left, free = [list(order) for order in schedule.orders], [0.0] * work.stages
    while any(left):
        before = sum(map(len, left))
        for s, order in enumerate(left):
            while order:
                slot, back = order[0]
                needs = [(s, p, False) for p in [work.parents[slot]] if p >= 0 and not back]
                needs += [(s, c, True) for c in work.children[slot] if back]
                neighbour = s + 1 if back else s - 1
                if 0 <= neighbour < work.stages:
                    needs.append((neighbour, slot, back))
                needs += [(s, slot, False)] if back else []
                if any(need not in ends for need in needs):
                    break
                begin = max([free[s], *(ends[need] for need in needs)])
                cost = (work.backward if back else work.forward)[s, slot]
                ends[s, slot, back] = free[s] = begin + cost
                order.pop(0)
        assert sum(map(len, left)) < before, "the stages wait for one another"
    return max(free)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_no_other_cut_is_better(stages: int) -> None:
    costs, head = [1.0] * 8, 2.5
    found = cut_layers(len(costs), stages, head)
    assert sum(s.layers for s in found) == len(costs) and min(s.layers for s in found) >= 1
    assert [s.first_layer for s in found][1:] == np.cumsum([s.layers for s in found])[:-1].tolist()

    def worst(cuts: Sequence[int]) -> float:
        ends = [0, *cuts, len(costs)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
        return max([*sums[:-1], sums[-1] + head])

    every = [worst(cuts) for cuts in itertools.combinations(range(1, len(costs)), stages - 1)]
    assert worst([s.first_layer for s in found][1:]) == min(every)


def test_more_stages_than_layers() -> None:
    with pytest.raises(PlanError, match="2 layers, which are to be cut into 3 stages"):
        cut_layers(2, 3)


def test_orders_by_hand() -> None:
    """A prefix and two leaves: later stages begin later, and the prefix's backward ends all."""
    found = order_stages(work_of([-1, 0, 0], 2))
    assert words(found) == ["f0 f1 f2 b1 b2 b0", "f0 f1 b1 f2 b2 b0"]
    assert found.time == 12 and found.peak_bytes == (3, 2)
    assert found.bubble == pytest.approx(1 - 9 / 12)
    # With room for two, the second leaf waits for the backward of the first.
    assert words(order_stages(work_of([-1, 0, 0], 2), [2, 2]))[0] == "f0 f1 b1 f2 b2 b0"
    # Of neighbours the one with the longest way comes first: here slot 1, which holds slot 2.
    assert words(order_stages(work_of([-1, -1, 1], 2)))[1].startswith("f1 f2")
    assert words(order_stages(work_of([-1, 0, 0, 2], 2)))[1].startswith("f0 f2 f3")
    # Two groups overlap.
    assert words(order_stages(work_of([-1, 0, -1, 2], 2)))[0] == "f0 f1 f2 f3 b1 b0 b3 b2"


@pytest.mark.parametrize("seed", range(6))
def test_drawn_orders(seed: int) -> None:
    """They run, as fast as predicted; budgets are kept to, down to that of one device."""
    stages = 2 + seed
    work = drawn(seed, 30, stages)
    bound = lower_bound(work)
    one = order_stages(work, [0.0] * stages)
    for room in (0.0, 6.0, np.inf):
        found = order_stages(work, [room] * stages)
        assert replayed(work, found) == pytest.approx(found.time)
        assert bound <= found.time * (1 + 1e-12)
        assert all(
            peak <= max(room, least)
            for peak, least in zip(found.peak_bytes, one.peak_bytes, strict=True)
        )
    free = order_stages(work)
    assert free.time <= min(three_barriers(work), one.time)
    assert free.time <= 1.18 * bound
    chosen = schedule_stages(work)
    assert chosen.time <= free.time * 1.006
    assert max(chosen.peak_bytes) <= max(free.peak_bytes)


def groups(seed: int, stages: int, count: int = 5, recomputed: float = 0.5) -> StageWork:
    """Groups whose prefixes are computed again, or hold as many bytes as their leaves."""
    rng = random.Random(seed)
    parents, costs, held, working = list[int](), list[float](), list[float](), list[float]()
    for _ in range(count):
        prefix, cost, again = len(parents), rng.uniform(1, 3), rng.random() < recomputed
        leaves = [rng.uniform(0.5, 2) for _ in range(rng.randint(2, 10))]
        parents += [-1, *(prefix for _ in leaves)]
        costs += [cost, *leaves]
        held += [0.1 if again else cost, *leaves]
        working += [cost * again, *(0.0 for _ in leaves)]
    by_stage = (np.tile(each, (stages, 1)) for each in (held, working))
    work = work_of(parents, stages, costs)
    return replace(work, **dict(zip(("held", "working"), by_stage, strict=True)))


def test_prefixes_leave_room_for_the_backward_of_one_of_them() -> None:
    """Three prefixes of three bytes fit ten bytes, but no backward of one, which needs five."""
    work = work_of([-1, 0, 0, -1, 3, 3, -1, 6, 6], 2)
    held, needed = (np.tile([prefix, leaf, leaf] * 3, (2, 1)) for prefix, leaf in ((3, 1), (5, 0)))
    found = order_stages(replace(work, held=held, working=needed), [10, 10])
    assert words(found)[0].startswith("f0 f1 f2 b1 b2 b0 f3") and found.peak_bytes == (8, 8)


def test_leaves_take_the_memory_that_a_recomputed_prefix_needs_later() -> None:
    work = work_of([-1, 0, 0, -1, 3, 3], 2)
    needed = np.zeros_like(work.forward)
    needed[:, [0, 3]] = 3
    found = order_stages(replace(work, working=needed), [5, 5])
    assert words(found)[0] == "f0 f3 f1 f2 f4 b1 f5 b2 b4 b5 b0 b3"
    assert found.peak_bytes == (5, 5) and found.time == order_stages(work, [6, 6]).time
    # If backwards of leaves need as much, one is open at a time.
    every = order_stages(replace(work, working=np.full_like(needed, 3)), [5, 5])
    assert every.time > found.time and max(every.peak_bytes) <= 5


def test_backwards_in_a_row_do_not_keep_the_next_stage_waiting() -> None:
    """With room for three, the first stage runs a forward before the next of two backwards."""
    work = work_of([-1] * 8, 2, [1.0, 2.0] * 4)
    found = order_stages(work, [3, 3])
    assert words(found)[0] == "f1 f3 f5 b1 f7 b3 f0 b5 f2 b7 f4 b0 f6 b2 b4 b6"
    assert found.time == 40 and lower_bound(work) == 39
    # One forward ahead of the second stage would take 51.
    assert order_stages(work_of([-1] * 7, 3, [2.0, 1, 1, 2, 3, 2, 1]), [4, 4, 4]).time == 48
    # Two forwards ahead would take memory that leaves of other lengths need.
    work = groups(0, 2, count=8, recomputed=1.0)
    assert order_stages(work, [4, 4]).time <= 1.15 * lower_bound(work)


def test_bound_and_1f1b_of_equal_microbatches() -> None:
    """M microbatches on S stages take (M + S - 1) slots of a forward and a backward, at best."""
    work = work_of([-1] * 8, 4)
    assert lower_bound(work) == order_stages(work).time == dense_1f1b(work) == (8 + 3) * 3


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_plans_of_stages(activations: Literal["keep", "recompute"]) -> None:
    """Every stage has the program in an order that keeps to the dependencies."""
    made = synthetic_rollouts(
        groups=3, rollouts_per_group=5, prompt_tokens=900, response_tokens=300, system_tokens=300
    )
    config = Config(
        sharing="tree", boundary="across", max_microbatch_tokens=512, activations=activations
    )
    plan = make_plan(RolloutBatch(made), SHAPE, config)
    plan = plan.with_program(scores=True)
    stages = cut_layers(SHAPE.layers, 3, 2.0)
    work = stage_work([plan.program], [stage_prices(plan, meter_of(plan))], stages)
    meter = meter_of(plan)
    every = [i for i in plan.program.training if not i.idle]
    assert (work.forward + work.backward).sum() == pytest.approx(_total(plan, every, meter))
    schedule = schedule_stages(work)
    plans = [stage_plan(plan, schedule, stage) for stage in stages]
    for stage, each in zip(stages, plans, strict=True):
        forwards = [i for i in each.program.instructions if i.operation != BACKWARD]
        assert stage.is_last or {i.ends_at for i in forwards} == {BLOCKS}
        if stage.is_last:
            check_program(each)
        assert each.cache_tokens >= plan.cache_tokens
    # Forwards have one order, so that neighbours send and receive in the same one.
    orders = [[i.slot for i in p.program.training if i.operation == FORWARD] for p in plans]
    assert orders[0] == orders[1] == orders[2]


def _total(plan: Plan, instructions: Sequence, meter) -> float:  # type: ignore[no-untyped-def, type-arg]
    total = 0.0
    for i in instructions:
        microbatch = plan.microbatches[i.microbatch]
        if i.operation == BACKWARD:
            total += meter.backward(microbatch)
        else:
            total += meter.forward(microbatch, boundary_only=i.ends_at != "head")
    return total
