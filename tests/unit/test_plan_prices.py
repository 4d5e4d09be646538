"""Plans with the same microbatches are priced once, and as each would be by itself."""

import math
from dataclasses import asdict, replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint import Config, PlanError, Rollout, RolloutBatch
from forkpoint.plan import builder, make_plan
from forkpoint.plan.builder import Builder
from forkpoint.plan.plan import Plan
from forkpoint.plan.predict import peak_bytes, plan_cost
from forkpoint.plan.pricing.meters import CountedMeter
from plan_shapes import SHAPE
from strategies import batches


@pytest.mark.slow
@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    batch=batches(),
    share=st.floats(0.3, 1.2),
    activations=st.sampled_from(("auto", "keep", "recompute")),
    couples=st.booleans(),
)
def test_every_plan_that_is_tried_has_its_own_price(
    batch: RolloutBatch, share: float, activations, couples: bool
) -> None:
    coupling = np.arange(len(batch)) if couples else None
    free = make_plan(batch, SHAPE, coupling=coupling)
    budget = max(1, int(share * (free.predicted_peak_bytes or 0)))
    config = Config(activations=activations, memory_budget=budget)
    seen: list[Plan] = []
    priced = Builder._with_price

    def watched(self: Builder, plan: Plan, meter, within: int | None = None) -> Plan:
        seen.append(priced(self, plan, meter, within))
        return seen[-1]

    least = mock.patch.object(builder, "LEAST_MICROBATCH_TOKENS", 2)
    with mock.patch.object(Builder, "_with_price", watched), least:
        try:
            make_plan(batch, SHAPE, config, coupling=coupling)
        except PlanError:
            assert seen
    for plan in seen:
        meter = CountedMeter(plan)
        peak = peak_bytes(plan, meter, SHAPE)
        assert plan.predicted_peak_bytes == peak
        assert plan.cost == (plan_cost(plan, meter) if peak <= budget else math.inf)


def test_the_same_microbatches_are_priced_once() -> None:
    """One group: sharing by groups and by tree are the same, as are many lengths."""
    prompt = list(range(1000))
    batch = RolloutBatch(
        Rollout([*prompt, 1000 + n, *range(300)], [0] * 1000 + [1] * 301, 1.0, group_id="g")
        for n in range(4)
    )
    config = Config(memory_budget=10**9)
    with mock.patch.object(builder, "plan_cost", wraps=plan_cost) as priced:
        plan = make_plan(batch, replace(SHAPE, windows=(0, 0)), config)
    assert len(plan.candidates) == 9
    microbatches = {
        tuple((r.segments, r.parent) for r in c.args[0].microbatches) for c in priced.call_args_list
    }
    assert priced.call_count == len(microbatches)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(batch=batches(), boundary=st.sampled_from(("within", "mixed", "across")))
def test_one_group_is_shared_by_groups_as_by_tree(batch: RolloutBatch, boundary) -> None:
    together = RolloutBatch(replace(rollout, group_id="g") for rollout in batch)
    config = Config(sharing="group", boundary=boundary)
    # By groups as if there were more than one, which sorts and packs by itself.
    with mock.patch.object(Builder, "_as", lambda _, sharing: sharing):
        apart = make_plan(together, SHAPE, config)
    plan = make_plan(together, SHAPE, config)
    assert [asdict(m) for m in plan.microbatches] == [asdict(m) for m in apart.microbatches]
    assert plan.cost == apart.cost
