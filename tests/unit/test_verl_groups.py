"""Prompts whose rollouts do not come together; verl itself is not needed here."""

from dataclasses import replace

from forkpoint.config import Config
from forkpoint.integrations.verl.groups import RankPart, sharing_message
from forkpoint.plan import make_plan
from forkpoint.rollouts.batch import Rollout, RolloutBatch


def part(*numbers: int, prompt: int = 40) -> RankPart:
    """A rank that has one rollout of each of these prompts' numbers."""
    rollouts = [
        Rollout([n + 1] * prompt + [100 + row] * 3, [0] * prompt + [1] * 3, 1.0)
        for row, n in enumerate(numbers)
    ]
    batch = RolloutBatch(rollouts)
    return RankPart.of(batch, make_plan(batch, config=Config(sharing="tree")))


def test_groups_together_say_nothing() -> None:
    # The second rank alone shares nothing.
    assert sharing_message([part(0, 0, 0, 1, 1, 1), part(2)]) is None


def test_groups_on_several_ranks_name_the_setting() -> None:
    parts = [part(0, 1, 1), part(1, 2, 3)]
    message = sharing_message(parts)
    assert message is not None and "1 of 4 prompts" in message
    assert "actor_rollout_ref.actor.use_prefix_grouper=true" in message


def test_prompts_that_are_exchanged_say_nothing() -> None:
    assert sharing_message([replace(part(0, 0, 1, 1), exchanged=True) for _ in range(2)]) is None


def test_short_prompts_are_told() -> None:
    message = sharing_message([part(0, 0, prompt=1)])
    # The last tokens of both do not count: 3 tokens of each, and nothing of 1 token is shared.
    assert message is not None and "of its 6 tokens run" in message
