"""Prompts whose rollouts do not stay together; verl itself is not needed here."""

from dataclasses import replace

import pytest

from forkpoint.config import Config
from forkpoint.integrations.verl.groups import LOOKED_AT, GroupWatch, RankGroups, sharing_message
from forkpoint.plan import make_plan
from forkpoint.rollouts.batch import Rollout, RolloutBatch

PROMPT, RESPONSE = 40, 3


def groups_of(*numbers: int, prompt: int = PROMPT) -> RankGroups:
    """A rank that has one rollout of each of these prompts' numbers."""
    rollouts = []
    for row, number in enumerate(numbers):
        tokens = [number + 1] * prompt + [100 + row] * RESPONSE
        rollouts.append(Rollout(tokens, [0] * prompt + [1] * RESPONSE, 1.0))
    batch = RolloutBatch(rollouts)
    return RankGroups.of(batch, make_plan(batch, config=Config(sharing="tree")))


def test_groups_together_say_nothing() -> None:
    assert sharing_message([groups_of(0, 0, 0), groups_of(1, 1, 1)], {}) is None


def test_groups_on_several_ranks_name_the_setting() -> None:
    message = sharing_message([groups_of(0, 1, 2), groups_of(0, 1, 2)], {})
    assert message is not None
    # Two ranks run each prompt, less the last token of each rollout: 2 * 3 * 42 of 2 * 3 * 43.
    assert "252 of its 258 tokens run (98%), and 120 of these would not" in message
    assert "3 of 3 prompts have rollouts on several ranks" in message
    assert "actor_rollout_ref.actor.use_prefix_grouper=true" in message
    assert "other mini-batches" not in message


def test_prompts_that_are_exchanged_say_nothing() -> None:
    ranks = [replace(groups_of(0, 1, 2, 0, 1, 2), exchanged=True) for _ in range(2)]
    assert sharing_message(ranks, {}) is None


def test_groups_in_several_mini_batches_name_the_setting() -> None:
    watch, said = GroupWatch(), []
    whole = groups_of(0, 0, 0, 0, 1, 1, 1, 1)
    watch.scored([whole])
    watch.trained([groups_of(0, 0, 1, 1)], said.append)
    (message,) = said
    assert "2 of 2 have rollouts in other mini-batches" in message
    assert "actor_rollout_ref.actor.shuffle=false" in message
    watch.trained([groups_of(0, 0, 1, 1)], said.append)
    assert len(said) == 1 and not watch.looks


def test_whole_groups_in_mini_batches_say_nothing() -> None:
    watch, said = GroupWatch(), []
    for _ in range(LOOKED_AT):
        assert watch.looks
        watch.scored([groups_of(0, 0, 0), groups_of(1, 1, 1)])
        watch.trained([groups_of(0, 0, 0), groups_of(1, 1, 1)], said.append)
    assert not said and not watch.looks


@pytest.mark.parametrize("silent", [True, False])
def test_short_prompts_are_told(silent: bool) -> None:
    said: list[str] = []
    watch = GroupWatch()
    watch.trained([groups_of(0, 0, prompt=1)], None if silent else said.append)
    assert not watch.looks
    assert len(said) == (0 if silent else 1)
    if said:
        assert "shares little" in said[0] and "rollout.n is small" in said[0]
