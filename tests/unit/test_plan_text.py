"""A plan as text, and the batch that it was made for."""

import re

import pytest

from forkpoint import Config, PlanError, Rollout, RolloutBatch
from forkpoint.plan import make_plan
from forkpoint.plan.plan import fingerprint
from plan_shapes import SHAPE


def batch_of(lists: list[list[int]]) -> RolloutBatch:
    """Rollouts of one group that train on their last token."""
    return RolloutBatch(
        Rollout(ids, [0] * (len(ids) - 1) + [1], 1.0, group_id="g") for ids in lists
    )


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
    assert "cost against the plan" in shared, "nothing dense was looked at"
