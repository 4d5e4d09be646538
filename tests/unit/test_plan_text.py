"""A plan as text, and the batch that it was made for."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint import Config, Plan, PlanError, Rollout, RolloutBatch
from forkpoint.plan import make_plan
from forkpoint.plan.plan import fingerprint
from plan_shapes import SHAPE
from strategies import batches


def batch_of(lists: list[list[int]]) -> RolloutBatch:
    """Rollouts of one group that train on their last token."""
    return RolloutBatch(
        Rollout(ids, [0] * (len(ids) - 1) + [1], 1.0, group_id="g") for ids in lists
    )


@settings(max_examples=20, derandomize=True, deadline=None)
@given(
    batches(),
    st.sampled_from((None, SHAPE)),
    st.one_of(st.none(), st.integers(1, 60)),
    st.sampled_from(("auto", "across")),
)
def test_every_plan_explains_its_counts(
    batch: RolloutBatch, shape, microbatch_tokens, boundary
) -> None:
    config = Config(max_microbatch_tokens=microbatch_tokens, boundary=boundary)
    plan = make_plan(batch, shape, config)
    check_explained(plan, plan.explain())


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


def check_explained(plan: Plan, text: str) -> None:
    """Every count is in the text, on the line that says what it is."""
    assert max(map(len, text.splitlines())) <= 100
    for label, count in (
        ("rollouts", f"{plan.rollouts:,}"),
        ("logical tokens (as given)", f"{plan.logical_tokens:,}"),
        ("unique tokens (once in the whole batch)", f"{plan.unique_tokens:,}"),
        ("computed tokens (edges run)", f"{plan.computed_tokens:,}"),
        ("labelled edges (head), for each temperature", f"{plan.num_loss_entries:,}"),
        ("microbatches, segments", f"{len(plan.microbatches):,}, {len(plan.forest):,}"),
        ("prefix cache held at once, tokens", f"{plan.cache_tokens:,}"),
    ):
        assert re.search(rf"│ {re.escape(label)} +│ +{re.escape(count)} │", text), (label, count)
    assert f"{plan.bound:.2f}x" in text
    assert " ".join(plan.reason.split()) in " ".join(text.split())
    for name in plan.microbatch_names[:24]:
        assert f"│ {name} " in text


def test_explain_in_full() -> None:
    batch = batch_of([[1, 2, 3, 4, 5, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7, 7, 7]])
    config = Config(sharing="group", boundary="across")
    text = make_plan(batch, config=config).explain()
    check = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    assert "plan: group + across, as asked" in check
    assert "dense over this plan (tokens) 1.67x" in check
    assert "group across 1.000 chosen" in check
    assert "prefix 0 - 1 3 3" in check
    assert "leaf 1 prefix 0 3 6 0" in check
    assert text.splitlines()[-5:] == [
        "segments: tokens x rollouts through them, and their microbatch",
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
    assert "cost against the plan" in shared, "nothing dense was looked at"
