"""Sums over the plans of batches, and what sharing saves."""

import pytest
from hypothesis import given, settings

from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.plan import ModelShape, Totals, make_plan
from forkpoint.rollouts.synthetic import synthetic_rollouts
from plan_shapes import SHAPE
from strategies import batches


def summed(*made: RolloutBatch, shape: ModelShape | None = None) -> Totals:
    totals = Totals()
    for batch in made:
        totals.add(batch, make_plan(batch, shape))
    return totals


@given(batch=batches())
@settings(max_examples=40, deadline=None)
def test_counts_are_those_of_plans(batch: RolloutBatch) -> None:
    totals = summed(batch, shape=SHAPE)
    for mode, work in totals.work.items():
        plan = make_plan(batch, SHAPE, Config(sharing=mode, boundary="across"))  # pyright: ignore[reportArgumentType]
        assert work == plan.shared, mode
        assert totals.bound(mode) == pytest.approx(plan.bound)
        assert totals.unique_tokens == plan.unique_tokens
    assert totals.work["none"] == make_plan(batch, SHAPE).dense
    group = make_plan(batch, SHAPE, Config(sharing="group", boundary="across"))
    firsts = {(g, r.token_ids[0]) for g, r in zip(batch.group_index.tolist(), batch, strict=True)}
    assert totals.group_tokens == group.computed_tokens + len(firsts)
    assert totals.logical_tokens == batch.logical_tokens
    assert totals.groups == len(batch.groups()) and totals.rollouts == len(batch)


@pytest.mark.parametrize("shape", [SHAPE, None])
def test_plans_add_up(shape: ModelShape | None) -> None:
    """A batch that shares much and one that shares nothing, each with the plan that fits it."""
    shared = synthetic_rollouts(
        groups=2, rollouts_per_group=4, prompt_tokens=600, response_tokens=300
    )
    alone = [Rollout([n + 1] * 700, [0] + [1] * 699, 1.0) for n in range(3)]
    batches = [RolloutBatch(part) for part in (shared, alone)]
    plans = [make_plan(batch, shape) for batch in batches]
    assert [plan.sharing for plan in plans] == ["group", "none"]
    totals = Totals()
    for batch, plan in zip(batches, plans, strict=True):
        totals.add(batch, plan)
    assert (totals.batches, totals.rollouts) == (2, 11)
    assert totals.kinds == {"group + within": 1, "none + within": 1}
    for name in ("computed_tokens", "logical_tokens", "unique_tokens"):
        assert getattr(totals, name) == sum(getattr(plan, name) for plan in plans)
    assert totals.group_tokens == totals.unique_tokens, "groups have nothing in common"
    assert totals.microbatches == sum(len(plan.microbatches) for plan in plans)
    peaks = [plan.predicted_peak_bytes for plan in plans]
    assert totals.predicted_peak_bytes == (max(filter(None, peaks)) if shape else None)
    # As weighed by what the batches cost, not the mean of two speed-ups.
    costs = [plan.cost for plan in plans]
    dense = [next(c.cost for c in plan.candidates if c.sharing == "none") for plan in plans]
    assert totals.predicted_speedup == pytest.approx(sum(filter(None, dense)) / sum(costs))
    assert totals.work["none"].tokens == sum(len(r) - 1 for r in (*shared, *alone))
    only = Config(sharing="tree")
    totals.add(batches[1], make_plan(batches[1], shape, only))
    assert totals.predicted_speedup is None, "dense was not looked at for one of them"
