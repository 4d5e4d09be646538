"""Where prompts of a group part, and what the first step says of it."""

import logging

import pytest
import torch

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.plan.parting import Parting, where_prompts_part
from forkpoint.testing import tiny_model

REST = list(range(40))


def batch(*prompts: list[int], group: str | None = "g") -> RolloutBatch:
    return RolloutBatch(
        Rollout([*ids, 9], [0] * len(ids) + [1], 1.0, group_id=group) for ids in prompts
    )


def test_the_first_difference_and_what_follows() -> None:
    found = where_prompts_part(batch([1, 2, 3, *REST], [1, 2, 4, 5, *REST], [1, 2, 4, 5, *REST]))
    assert found == Parting(grouped=True, token=2, following=40)
    assert where_prompts_part(batch(REST, REST)) is None
    # A prompt that goes on is no longer where the other ends.
    assert where_prompts_part(batch(REST, [*REST, 1])) == Parting(True, 40, 0)
    assert where_prompts_part(batch([7], [7, 7])) == Parting(True, 1, 0), "counted once"


def test_groups_that_fall_apart_by_their_prompts() -> None:
    """Without ids of groups a timestamp makes each rollout a group of its own."""
    assert where_prompts_part(batch([1, *REST], [2, *REST], group=None)) == Parting(False, 0, 40)
    assert where_prompts_part(batch([1, 5, 5], [2, 5, 5], group=None)) is None, "other questions"


@pytest.mark.parametrize("sharing", ["auto", "none"])
def test_the_first_step_warns_once(sharing, caplog: pytest.LogCaptureFixture) -> None:
    policy = forkpoint.wrap(tiny_model("llama", dtype=torch.float64), Config(sharing=sharing))
    with caplog.at_level(logging.WARNING, "forkpoint"):
        for _ in range(2):
            policy.forward_backward(batch([1, *REST], [2, *REST]), forkpoint.losses.GRPO())
    said = [r.getMessage() for r in caplog.records if "shares little" in r.getMessage()]
    assert len(said) == (sharing == "auto")
    assert all("part at token 0, 40 equal tokens follow" in message for message in said)
