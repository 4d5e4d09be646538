"""Where prompts of a group part, and what the first step says of it."""

import logging

import pytest
import torch

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.plan.parting import (
    GroupParting,
    Parting,
    where_groups_part,
    where_prompts_part,
)
from forkpoint.testing import tiny_model

REST = list(range(40))


def batch(*prompts: list[int], group: str | None = "g") -> RolloutBatch:
    return RolloutBatch(
        Rollout([*ids, 9], [0] * len(ids) + [1], 1.0, group_id=group) for ids in prompts
    )


def test_the_first_difference_and_what_follows() -> None:
    found = where_prompts_part(batch([1, 2, 3, *REST], [1, 2, 4, 5, *REST], [1, 2, 4, 5, *REST]))
    assert found == Parting(grouped=True, group="g", token=2, following=40)
    assert where_prompts_part(batch(REST, REST)) is None
    assert where_prompts_part(batch(REST, [*REST, 1])) is None, "nothing follows"
    # A prompt that is the end of the other: tokens before the difference count once.
    assert where_prompts_part(batch([7] * 50, [7] * 90)) is None
    assert where_prompts_part(batch([1, *REST[9:]], [2, *REST[9:]])) is None, "31 equal tokens"
    assert where_prompts_part(batch([1, *REST[8:]], [2, *REST[8:]])) == Parting(True, "g", 0, 32)


def test_groups_that_fall_apart_by_their_prompts() -> None:
    """Without ids of groups a timestamp makes each rollout a group of its own."""
    found = where_prompts_part(batch([1, *REST], [2, *REST], group=None))
    assert found == Parting(False, None, 0, 40)
    assert where_prompts_part(batch([1, 5, 5], [2, 5, 5], group=None)) is None, "other questions"


def group(name: str | None, *rollouts: tuple[list[int], int]) -> list[Rollout]:
    """Rollouts of (ids, tokens before the first trained one)."""
    return [
        Rollout(ids, [0] * start + [1] * (len(ids) - start), 1.0, group_id=name)
        for ids, start in rollouts
    ]


AFTER = group("after", ([1, 2, 3, 4], 3), ([1, 2, 3, 5, 6], 3))
WITHIN = group("within", ([1, 2, 3, 4], 2), ([1, 2, 3, 5, 6, 7], 2), ([1, 3, 3, 4], 2))
ONE, SAME = group("one", ([1, 2], 1)), group("same", ([5, 6], 1), ([5, 6], 1))


def test_where_groups_part() -> None:
    """All rollouts of a group count, not those next to each other; a prompt may end earlier."""
    found = where_groups_part(RolloutBatch([*ONE, *WITHIN, *SAME, *AFTER]))
    assert found == [
        GroupParting("within", 1, 3, token=1, shortest=4, longest=6, in_prompt=True),
        GroupParting("after", 6, 2, token=3, shortest=4, longest=5, in_prompt=False),
    ]
    ends = group("g", ([1, 2, 3], 2), ([1, 2], 1))  # equal up to the end of the shorter one
    assert where_groups_part(RolloutBatch(ends)) == [GroupParting("g", 0, 2, 2, 2, 3, False)]
    longer = group("g", ([1, 2, 9, 9], 3), ([1, 2, 8], 1))  # within the prompt of one of them
    assert where_groups_part(RolloutBatch(longer)) == [GroupParting("g", 0, 2, 2, 3, 4, True)]


@pytest.mark.parametrize("sharing", ["auto", "none"])
def test_the_first_step_warns_once(sharing, caplog: pytest.LogCaptureFixture) -> None:
    policy = forkpoint.wrap(tiny_model("llama", dtype=torch.float64), Config(sharing=sharing))
    with caplog.at_level(logging.WARNING, "forkpoint"):
        for _ in range(2):
            policy.forward_backward(batch([1, *REST], [2, *REST]), forkpoint.losses.GRPO())
    said = [r.getMessage() for r in caplog.records if "shares little" in r.getMessage()]
    assert len(said) == (sharing == "auto")
    assert all("diverge at token 0, 40 equal tokens follow" in message for message in said)
