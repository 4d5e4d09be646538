"""Decisions and refusals of the planner, and who may share."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint import Config, PlanError, Rollout, RolloutBatch
from forkpoint.plan import Plan, builder, make_plan, planner
from forkpoint.plan.plan import fingerprint
from forkpoint.plan.predict import plan_cost
from forkpoint.plan.pricing import meters
from forkpoint.plan.pricing.meters import meter_of
from forkpoint.units import GIB
from plan_shapes import SHAPE
from strategies import batches


def batch_of(lists: list[list[int]], groups: list[str] | None = None, **fields) -> RolloutBatch:
    """Rollouts of one group, or of those named, that train on their last token."""
    return RolloutBatch(
        Rollout(
            ids,
            [0] * (len(ids) - 1) + [int(len(ids) > 1)],
            1.0,
            group_id=groups[i] if groups else "g",
            **fields,
        )
        for i, ids in enumerate(lists)
    )


def group(
    prompt: int = 1000, response: int = 50, count: int = 8, first: int = 0
) -> list[list[int]]:
    """`count` rollouts of one prompt; the ids start at `first` and none comes twice."""
    shared = list(range(first, first + prompt))
    ids = iter(range(first + prompt, first + prompt + count * response))
    return [shared + [next(ids) for _ in range(response)] for _ in range(count)]


FOUR_GROUPS = batch_of([ids for first in range(0, 8_000, 2_000) for ids in group(first=first)])

# What auto decides


def test_auto_is_dense_where_nothing_is_shared() -> None:
    plan = make_plan(batch_of(group(prompt=1, response=300)))
    assert (plan.sharing, plan.boundary) == ("none", "within")
    assert plan.reason == "no plan that shares costs 0.5% less than dense"
    assert plan.bound == 1.0


def test_auto_shares_over_groups_that_begin_alike() -> None:
    lists = [[*ids, 5_000 + i] for i, ids in enumerate(group(prompt=1000, response=300, count=2))]
    plan = make_plan(batch_of(lists, groups=["one", "two"]))
    assert plan.sharing == "tree"
    assert plan.computed_tokens == 999 + 2 * 301


def test_auto_avoids_splitting_what_a_loss_couples_where_that_is_cheaper() -> None:
    # A prompt of 100 edges and four responses of 100, all trained, in microbatches of at most 420:
    # 500 tokens with the fork across microbatches, 600 with the prompt in both microbatches of
    # whole paths.
    batch = RolloutBatch(
        Rollout(ids, np.arange(len(ids)) > 0, 1.0, group_id="g")
        for ids in group(prompt=101, response=100, count=4)
    )
    config = Config(max_microbatch_tokens=420, sharing="group")
    coupling = np.arange(4)
    with mock.patch.object(meters, "EFFICIENT_TOKENS", 1):
        free = make_plan(batch, config=config)
        assert (free.boundary, plan_cost(free, meter_of(free))) == ("mixed", 500)
        assert free.splits(batch, coupling)
        scored = free.with_program(scores=True)
        assert plan_cost(scored, meter_of(scored)) == 500 * 4 / 3
        coupled = make_plan(batch, config=config, coupling=coupling)
        assert (coupled.boundary, plan_cost(coupled, meter_of(coupled))) == ("within", 600)
        assert [microbatch.tokens for microbatch in coupled.microbatches] == [400, 200]
        # In pairs, the second pair lies in both microbatches.
        pairs = np.array([0, 0, 1, 1])
        assert coupled.splits(batch, pairs)
        assert make_plan(batch, config=config, coupling=pairs).boundary == "mixed"


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    batches(),
    st.sampled_from((None, SHAPE)),
    st.sampled_from((1, 16, 256)),
    st.one_of(st.none(), st.integers(1, 60)),
    st.sampled_from((None, "rollout", "joint")),
)
def test_auto_never_costs_more_than_dense(
    batch: RolloutBatch, shape, efficient: int, microbatch_tokens, coupled
) -> None:
    coupling = {
        None: None,
        "rollout": np.arange(len(batch)),
        "joint": np.zeros(len(batch), np.int64),
    }[coupled]
    config = Config(max_microbatch_tokens=microbatch_tokens)
    with mock.patch.object(meters, "EFFICIENT_TOKENS", efficient):
        plan = make_plan(batch, shape, config, coupling=coupling)
        costs = [c.cost for c in plan.candidates if c.cost is not None]
        dense = [c.cost for c in plan.candidates if c.sharing == "none" and c.cost is not None]
        assert len(plan.candidates) == 9
        assert dense
        cost = plan_cost(plan, meter_of(plan))
        assert cost in costs
        assert cost <= dense[0]
        assert cost <= min(costs) * (1 + planner.SIMPLER_IS_WORTH)


# Limits


def test_a_memory_budget_lowers_microbatch_tokens_until_it_holds() -> None:
    config = Config(sharing="group", boundary="within", checkpointing="none")
    free = make_plan(FOUR_GROUPS, SHAPE, config)
    assert (free.max_microbatch_tokens, len(free.microbatches)) == (16_384, 1)
    assert free.predicted_peak_bytes == 4 * 1399 * SHAPE.activation_bytes()
    half = 2 * 1399 * SHAPE.activation_bytes()
    # In so small a shape attention outweighs all else, and a microbatch for each group has fewer
    # launches.
    with mock.patch.object(meters, "LAUNCH_KEYS", 0):
        plan = make_plan(FOUR_GROUPS, SHAPE, dataclasses.replace(config, memory_budget=half))
    assert plan.max_microbatch_tokens < 2 * 1399 + 1399
    assert plan.predicted_peak_bytes == half
    assert [microbatch.tokens for microbatch in plan.microbatches] == [2 * 1399, 2 * 1399]


@pytest.mark.parametrize("measured", [False, True])
def test_a_largest_length_is_kept_to_and_shortened_if_memory_is_short(*, measured: bool) -> None:
    config = Config(sharing="group", checkpointing="none", max_microbatch_tokens=3000)
    free = make_plan(FOUR_GROUPS, SHAPE, config)
    peak = free.predicted_peak_bytes or 0

    def within(budget: int, **options: Any) -> Plan:
        limited = dataclasses.replace(config, **options)
        if measured:
            return make_plan(FOUR_GROUPS, SHAPE, limited, budget_bytes=budget)
        return make_plan(FOUR_GROUPS, SHAPE, dataclasses.replace(limited, memory_budget=budget))

    enough = within(peak)
    assert (enough.max_microbatch_tokens, enough.boundary) == (3000, free.boundary)
    assert [m.segments for m in enough.microbatches] == [m.segments for m in free.microbatches]
    for budget in (peak - 1, peak // 2):
        short = within(budget)
        assert short.fits and short.max_microbatch_tokens < 3000
        # As without a limit of the length, but for where the search begins.
        automatic = within(budget, max_microbatch_tokens=None)
        assert short.cost <= automatic.cost * 1.05
        assert max(m.tokens for m in short.microbatches) <= 3000


@pytest.mark.parametrize("first", [1, 7])
def test_sharing_over_the_batch_is_built_only_if_groups_share(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Prompts of two groups with equal or different first tokens."""
    made: list[str] = []
    build = builder.Builder._fitting

    def counted(self: Any, sharing: str, boundary: str) -> Plan:
        made.append(sharing)
        return build(self, sharing, boundary)

    monkeypatch.setattr(builder.Builder, "_fitting", counted)
    rows = [
        [one, *range(10, 600), 700 + n, 5] for one, n in ((1, 0), (1, 1), (first, 2), (first, 3))
    ]
    batch = batch_of(rows, ["a", "a", "b", "b"])
    plan = make_plan(batch, SHAPE, Config(boundary="within"))
    costs = {c.sharing: c.cost or 0.0 for c in plan.candidates}
    assert made == ["none", "group", "tree"][: 3 if first == 1 else 2]
    assert (costs["tree"] < costs["group"]) == (first == 1) and costs["group"] < costs["none"]
    asked = make_plan(batch, SHAPE, Config(sharing="tree", boundary="within"))
    assert (asked.sharing, asked.cost) == ("tree", costs["tree"])


def test_logits_are_kept_where_a_budget_has_room() -> None:
    config = Config(sharing="group", boundary="across", max_microbatch_tokens=1000)

    def planned(
        logits: Any, budget: int | str | None = None, measured: int | None = None
    ) -> tuple[int, list[int], Plan]:
        options: dict[str, Any] = {"head_logits": logits, "memory_budget": budget}
        asked = dataclasses.replace(config, **options)
        plan = make_plan(FOUR_GROUPS, SHAPE, asked, budget_bytes=measured)
        keeping = [m.index for m in plan.microbatches if m.keeps_logits]
        assert ("logits kept in" in plan.explain()) == bool(keeping)
        return plan.predicted_peak_bytes or 0, keeping, plan

    (most, every, kept), (least, none, again) = planned("keep"), planned("recompute")
    assert every == [m.index for m in kept.microbatches if not m.children]
    assert 0 < len(every) < len(kept.microbatches) and not none and not planned("auto")[1]
    assert kept.cost < again.cost and most > least
    assert (most - least) % (SHAPE.vocab * SHAPE.dtype_bytes) == 0
    assert planned("keep", most)[:2] == (most, every)
    for budget in (most, least):
        assert planned("recompute", budget)[:2] == (least, [])
        peak, keeping, _ = planned("auto", budget)
        assert peak <= budget and (keeping == every) == (budget == most)
    # Of a measured budget they take at most nine tenths.
    room = -(-most * 10 // 9)
    assert planned("auto", "auto", room)[:2] == (most, every)
    for measured in (room - 10, least):
        peak, keeping, _ = planned("auto", "auto", measured)
        assert least <= peak <= max(least, measured * 0.9) and len(keeping) < len(every)
    assert planned("auto", "auto", least)[1] == []
    assert planned("recompute", "auto", room)[:2] == (least, [])
    # Policies without a free GiB have a budget of one.
    for measured, expected in ((GIB, []), (2 * GIB, every)):
        assert planned("auto", "auto", measured)[1] == expected


def test_offloaded_activations_beyond_the_host_memory_leave_less_room_for_logits() -> None:
    config = Config(
        sharing="group",
        boundary="across",
        max_microbatch_tokens=1000,
        activations="offload",
        host_memory=1,
        head_logits="recompute",
    )
    without = make_plan(FOUR_GROUPS, SHAPE, config)
    budget = without.predicted_peak_bytes
    auto = dataclasses.replace(config, head_logits="auto", memory_budget=budget)
    assert make_plan(FOUR_GROUPS, SHAPE, auto).cost <= without.cost


def test_peak_bytes_count_the_microbatches_open_at_once_and_the_arena() -> None:
    batch = batch_of([[1, 2, 3, 4, 5, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7, 7, 7]])
    config = Config(sharing="group", boundary="across", max_microbatch_tokens=3)
    plan = make_plan(batch, SHAPE, config)
    assert [microbatch.tokens for microbatch in plan.microbatches] == [3, 3, 3]
    assert plan.cache_tokens == 3
    boundary = 2 * 2 * (16 + 16) * (2 + 4)
    assert plan.predicted_peak_bytes == 6 * SHAPE.activation_bytes() + 3 * boundary


def test_a_budget_without_a_shape_is_refused() -> None:
    with pytest.raises(PlanError, match="memory_budget is 1000 bytes, but without a model shape"):
        make_plan(batch_of(group()), None, Config(memory_budget=1000))


def test_a_combination_that_does_not_fit_is_left_out_and_said_so() -> None:
    plan = make_plan(batch_of(group()), config=Config(max_microbatch_tokens=1000))
    refused = {(c.sharing, c.boundary) for c in plan.candidates if c.refused}
    assert refused == {(sharing, "within") for sharing in ("none", "group", "tree")}
    assert plan.boundary == "mixed"
    assert "rollout 0 has 1049 tokens" in " ".join(plan.explain(width=400).split())


# What may share, and what is split


def test_rollouts_are_split_where_trained_tokens_lie_in_several_microbatches() -> None:
    # Trained: suffix only; prefix and suffix; prefix only; nothing.
    lists = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 3, 7]]
    masks = [[0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]
    batch = RolloutBatch(
        Rollout(ids, mask, 1.0, group_id="g") for ids, mask in zip(lists, masks, strict=True)
    )
    plan = make_plan(batch, config=Config(sharing="group", boundary="across"))
    assert plan.splits(batch, np.arange(4))
    one = batch.select([0, 2, 3])
    plan = make_plan(one, config=Config(sharing="group", boundary="across"))
    assert not plan.splits(one, np.arange(3))
    assert plan.splits(one, np.zeros(3, np.int64))


# Rollouts of one path at several temperatures: the body once, the head for each


def at_temperatures(*temperatures: float, masks: Sequence[Sequence[int]] = ()) -> RolloutBatch:
    """One rollout at each temperature, of the same tokens."""
    every = masks or [[0, 0, 1, 1]] * len(temperatures)
    return RolloutBatch(
        Rollout([1, 2, 3, 4], mask, 1.0, temperature=temperature, group_id="g")
        for temperature, mask in zip(temperatures, every, strict=True)
    )


@pytest.mark.parametrize(
    ("temperatures", "masks", "num_loss_entries"),
    [
        ((0.7, float(np.nextafter(0.7, 1))), (), 4),
        ((1.0, 0.5), ([0, 0, 1, 1], [0, 1, 0, 1]), 4),  # one shares its temperature with nobody
    ],
)
def test_an_edge_has_an_entry_for_each_temperature_that_trains_it(
    temperatures, masks, num_loss_entries
) -> None:
    batch = at_temperatures(*temperatures, masks=masks)
    plan = make_plan(batch, SHAPE, Config(sharing="tree", boundary="across"))
    assert (plan.computed_tokens, plan.num_loss_entries) == (3, num_loss_entries)
    # Of a head whose outputs do not depend on temperatures.
    critic = make_plan(
        batch, SHAPE, Config(sharing="tree", boundary="across"), uses_temperature=False
    )
    once = int(batch.loss_mask.reshape(len(batch), -1).any(0).sum())
    assert (critic.computed_tokens, critic.num_loss_entries) == (3, once)
    assert critic.dense == plan.dense


def test_the_bound_counts_the_head_for_each_temperature() -> None:
    one, two = at_temperatures(1.0, 1.0), at_temperatures(1.0, 0.5)
    config = Config(sharing="tree", boundary="across")
    first, second = make_plan(one, SHAPE, config), make_plan(two, SHAPE, config)
    entry = 3 * 2.0 * SHAPE.hidden * SHAPE.vocab
    assert first.dense == second.dense
    assert second.shared.step_flops(SHAPE) - first.shared.step_flops(SHAPE) == 2 * entry
    assert second.bound < first.bound
    # By the same, the price; and the bytes of logits that are kept.
    assert second.cost - first.cost == pytest.approx(2 * entry * 4 / 3)
    keeping = Config(sharing="tree", boundary="across", head_logits="keep")
    peaks = [make_plan(batch, SHAPE, keeping).predicted_peak_bytes or 0 for batch in (one, two)]
    assert peaks[1] - peaks[0] == 2 * SHAPE.vocab * SHAPE.dtype_bytes


# A plan as text, and the batch that it was made for


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 2, 3, 5]},
        {"token_ids": [1, 2, 3], "loss_mask": [0, 0, 1]},
        {"loss_mask": [0, 1, 1, 1]},
        {"temperature": 0.5},
        {"group_id": "other"},
    ],
)
def test_a_plan_refuses_another_batch(changes) -> None:
    fields = {"token_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "advantage": 1.0}
    first = Rollout(**fields, group_id="g")
    plan = make_plan(RolloutBatch([first, Rollout(**{**fields, "group_id": "g"})]))
    plan.check_batch(
        RolloutBatch([first, Rollout(**{**fields, "group_id": "g", "advantage": 2.0})])
    )
    other = RolloutBatch([first, Rollout(**{**fields, "group_id": "g", **changes})])
    with pytest.raises(PlanError, match=plan.fingerprint) as refused:
        plan.check_batch(other)
    assert fingerprint(other) in str(refused.value)


def test_explain_has_the_counts() -> None:
    batch = batch_of([[1, 2, 3, 4, 5, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7, 7, 7]])
    plan = make_plan(batch, config=Config(sharing="group", boundary="across"))
    text = plan.explain()
    counts = [plan.rollouts, plan.logical_tokens, plan.unique_tokens, plan.computed_tokens]
    counts += [plan.num_loss_entries, f"{len(plan.microbatches)}, {len(plan.forest)}"]
    for count in (*counts, plan.cache_tokens):
        assert re.search(rf"│ +{count} │", text), count
    assert f"{plan.bound:.2f}x" in text and all(f"│ {n} " in text for n in plan.microbatch_names)
    assert text.splitlines()[-4:] == [
        "└── 3 x 3  prefix 0",
        "    ├── 2 x 1  leaf 1",
        "    ├── 1 x 1  leaf 1",
        "    └── 3 x 1  leaf 1",
    ]


def test_what_was_looked_at_has_its_predicted_speed_up() -> None:
    plan = make_plan(batch_of([[*range(40), n] for n in range(8)]), SHAPE)
    dense = min(c.cost for c in plan.candidates if c.sharing == "none" and c.cost)
    text = plan.explain()
    assert "predicted speed-up" in text
    for candidate in plan.candidates:
        assert candidate.cost
        line = f"{candidate.sharing} +│ {candidate.boundary} +│ +{dense / candidate.cost:.3f}x"
        assert re.search(line, text)
    assert dense > plan.cost
    shared = make_plan(batch_of([[1, 2, 3], [1, 2, 4]]), SHAPE, Config(sharing="tree")).explain()
    assert "cost relative to the plan" in shared, "no dense plan was compared"
