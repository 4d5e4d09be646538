"""Leaves that ranks of context parallelism run whole: which parts, at what price, and when."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from forkpoint import Config, RolloutBatch
from forkpoint.errors import PlanError
from forkpoint.plan import Plan, make_plan
from forkpoint.plan.builder import Builder
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.dealing import deal
from forkpoint.plan.entries import segment_entries
from forkpoint.plan.predict import cache_bytes
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.meters import meter_of
from made_calibrations import LINK, SHAPE, group, made_up

TWO = replace(SHAPE, context=2)
ACROSS = Config(sharing="tree", boundary="across", max_microbatch_tokens=4096)
BY_HEADS = Capabilities(deals_segments=False)


def by_heads(batch: RolloutBatch, shape: ModelShape = TWO, config: Config = ACROSS) -> Plan:
    return make_plan(batch, shape, config, capabilities=BY_HEADS)


def dealt(batch: RolloutBatch, shape: ModelShape = TWO) -> Plan:
    plan = by_heads(batch, shape)
    return deal(plan, segment_entries(plan.forest, batch))


def linked(bytes_per_ms: float, latency_ms: float = 0.0) -> Calibration:
    rates = {f"{way}_bytes_per_ms": bytes_per_ms for way in ("gather", "send")}
    waits = {f"{way}_latency_ms": latency_ms for way in ("gather", "send")}
    return made_up(link=replace(LINK, **rates, **waits))


def test_each_segment_is_in_one_part_and_parts_are_even() -> None:
    plan = dealt(group(1001, 400, 5), replace(SHAPE, context=3))
    trunk, leaf = plan.microbatches
    assert not trunk.parts and trunk.gathered and not leaf.gathered
    assert sorted(s for part in leaf.parts for s in part.segments) == sorted(leaf.segments)
    assert [len(part.segments) for part in leaf.parts] == [2, 2, 1]
    assert [part.tokens for part in leaf.parts] == [800, 800, 400]
    assert [part.num_loss_entries for part in leaf.parts] == [800, 800, 400]
    assert [part.segment_begin for part in leaf.parts] == [(0, 400), (0, 400), (0,)]


EXCHANGED, APART = [[1200, 1200], [800, 800]], [[1200, 800], [1200, 800]]
"""Tokens of parts of two leaves of five responses each, which exchange one or none."""


def tokens_of_parts(plan: Plan) -> list[list[int]]:
    return [[part.tokens for part in m.parts] for m in plan.microbatches[1:]]


def test_leaves_of_one_prompt_exchange_trees() -> None:
    batch = group(1001, 400, 10)
    plan = by_heads(batch, config=replace(ACROSS, max_microbatch_tokens=2000))
    entries_S = segment_entries(plan.forest, batch)
    assert tokens_of_parts(deal(plan, entries_S)) == EXCHANGED
    assert tokens_of_parts(deal(plan, entries_S, pooled=False)) == APART


@pytest.mark.parametrize(
    "coupled, parts, scores",
    [([0] * 5 + [1] * 5, APART, False), (range(10), EXCHANGED, False), ([0] * 10, EXCHANGED, True)],
)
def test_leaves_exchange_no_trees_that_a_loss_couples(
    coupled: Sequence[int], parts: list[list[int]], scores: bool
) -> None:
    config = replace(ACROSS, max_microbatch_tokens=2000)
    coupling, calibration = np.array(coupled), linked(1e3)
    batch = group(1001, 400, 10)
    plan = make_plan(batch, TWO, config, coupling=coupling, calibration=calibration)
    assert tokens_of_parts(plan) == parts and plan.program.has_scores == scores


def test_leaves_with_fewer_trees_than_ranks_run_by_heads() -> None:
    batch = group(1001, 400, 3)
    assert not any(m.parts for m in dealt(batch, replace(SHAPE, context=4)).microbatches)
    plan = make_plan(batch, replace(SHAPE, context=4), ACROSS)
    assert not any(m.parts or m.gathered for m in plan.microbatches)
    assert "no leaf has as many trees as there are ranks" in plan.explain()


def test_milliseconds_of_parts_and_of_gathering_by_hand() -> None:
    plan, calibration = dealt(group(1001, 400, 5)), linked(1e3, 0.5)
    (trunk, leaf), meter = plan.microbatches, meter_of(plan, calibration)
    # Three of five responses, whole: 1 us forward and 2 us backward for each token and layer.
    assert meter.forward(leaf) == pytest.approx(SHAPE.layers * 1200 * 1e-3, rel=1e-5)
    assert meter.backward(leaf) == pytest.approx(SHAPE.layers * 1200 * 2e-3, rel=1e-5)
    assert meter.kept_bytes(leaf) == SHAPE.layers * 1200 * 100
    # Half of 1,000 tokens' keys and values goes to the other rank, and float32 gradients back.
    numbers = 1000 * SHAPE.layers * SHAPE.kv_heads * 2 * SHAPE.head_dim // 2
    plain = replace(trunk, gathered=False)
    heads = meter_of(replace(plan, microbatches=(plain,)), calibration)
    for nbytes, gathered, alone in (
        (SHAPE.dtype_bytes, meter.forward(trunk), heads.forward(plain)),
        (4, meter.backward(trunk), heads.backward(plain)),
    ):
        wanted = numbers * nbytes / 1e3 + 2 * SHAPE.layers * 0.5
        assert gathered - alone == pytest.approx(wanted)


def test_bytes_that_are_sent_and_held() -> None:
    batch = group(1001, 400, 5)
    plan, other = dealt(batch), by_heads(batch)
    numbers = 1000 * SHAPE.layers * SHAPE.kv_heads * 2 * SHAPE.head_dim // 2
    trunk = replace(other, microbatches=other.microbatches[:1])
    alone = tuple(i for i in trunk.program.instructions if i.microbatch == 0)
    of_trunk = replace(trunk, program=replace(trunk.program, instructions=alone)).sent_bytes
    assert plan.sent_bytes == of_trunk + numbers * (SHAPE.dtype_bytes + 4)
    assert cache_bytes(plan) == 3 * cache_bytes(other)  # by heads, and of both ranks


@pytest.mark.parametrize(
    "prompt, response, taken", [(101, 2000, "by responses"), (4001, 20, "by heads")]
)
def test_the_planner_deals_where_that_is_predicted_to_be_faster(
    prompt: int, response: int, taken: str
) -> None:
    batch, calibration = group(prompt, response, 8), linked(1e5)
    config = replace(ACROSS, max_microbatch_tokens=16_384)
    plan = make_plan(batch, TWO, config, calibration=calibration)
    heads = make_plan(batch, TWO, config, calibration=calibration, capabilities=BY_HEADS)
    whole = deal(heads, segment_entries(heads.forest, batch))
    assert plan.dealing.startswith(f"leaves split {taken}: predicted")
    assert plan.dealing in " ".join(plan.explain().split())
    assert any(m.parts for m in plan.microbatches) == (taken != "by heads")
    assert whole.microbatches[-1].parts
    if taken != "by heads":
        assert plan.cost < heads.cost


def test_leaves_that_do_not_fit_run_by_heads() -> None:
    batch, calibration = group(4001, 2000, 8), linked(1e5)
    config = replace(ACROSS, max_microbatch_tokens=16_384)
    free = make_plan(batch, TWO, config, calibration=calibration)
    assert free.predicted_peak_bytes is not None and any(m.parts for m in free.microbatches)
    least = make_plan(batch, TWO, config, calibration=calibration, capabilities=BY_HEADS)
    assert least.predicted_peak_bytes is not None
    room = (least.predicted_peak_bytes + free.predicted_peak_bytes) // 2
    options = {"calibration": calibration, "budget_bytes": room}
    first = Builder(batch, TWO, config, capabilities=free.capabilities, **options)
    plan = first.build(config.sharing, config.boundary)
    assert plan.fits and not any(m.parts for m in plan.microbatches)
    assert plan.dealing.endswith("they do not fit the memory budget")
    shorter = make_plan(batch, TWO, config, **options)
    assert shorter.fits and any(m.parts for m in shorter.microbatches)
    assert shorter.cost < plan.cost


def test_microbatches_are_as_long_as_leaves_by_responses_need() -> None:
    batch, calibration = group(1001, 2000, 8), linked(1e5)
    config = Config(sharing="tree", boundary="mixed")
    free = make_plan(batch, TWO, config, calibration=calibration)
    config = replace(config, memory_budget=(free.predicted_peak_bytes or 0) * 7 // 10)
    plan = make_plan(batch, TWO, config, calibration=calibration)
    for tokens in (4096, 5362, 7005):
        shorter = replace(config, max_microbatch_tokens=tokens)
        assert plan.cost < 1.01 * make_plan(batch, TWO, shorter, calibration=calibration).cost


def test_leaves_by_responses_keep_logits_only_if_they_fit() -> None:
    batch, calibration = group(1001, 400, 3), linked(1e2)
    free = make_plan(batch, TWO, ACROSS, calibration=calibration)
    budget = free.predicted_peak_bytes or 0
    for size, keeps in ((budget, False), (2 * budget, True)):
        config = replace(ACROSS, memory_budget=size)
        leaf = make_plan(batch, TWO, config, calibration=calibration).microbatches[-1]
        assert len(leaf.parts) == 2
        assert {m.keeps_logits for m in (leaf, *leaf.parts)} == {keeps}


def test_layers_that_carry_a_state_run_by_heads() -> None:
    shape = replace(TWO, layers=5, recurrent_layers=1, recurrent_parameters=1)
    plan = make_plan(group(101, 400, 8), shape, ACROSS)
    assert plan.dealing == "leaves split by heads: some layers carry a state"


def test_other_ranks_than_the_plan_was_made_for_are_refused() -> None:
    plan = dealt(group(1001, 400, 5))
    plan.check_host(Capabilities(), 2)
    by_heads(group(1001, 400, 5)).check_host(Capabilities(), 1)
    for ranks in (1, 4):
        with pytest.raises(PlanError, match=f"2 context-parallel ranks.* model has {ranks}"):
            plan.check_host(Capabilities(), ranks)


def test_models_with_states_refuse_whole_leaves() -> None:
    plan = dealt(group(1001, 400, 5))
    plan.check_host(Capabilities(), 2)
    by_heads(group(1001, 400, 5)).check_host(BY_HEADS, 2)
    with pytest.raises(PlanError, match="carry a state, which allows only a split by heads"):
        plan.check_host(BY_HEADS, 2)
