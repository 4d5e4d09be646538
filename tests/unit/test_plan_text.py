"""A plan as text, and the batch that it was made for."""

import pytest

from forkpoint import PlanError, Rollout, RolloutBatch
from forkpoint.plan import make_plan
from forkpoint.plan.plan import fingerprint


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
