"""Made-up rollouts: what they promise to share, and that they are the same for the same seed."""

import numpy as np
import pytest

from forkpoint import ConfigError, RolloutBatch
from forkpoint.rollouts.synthetic import normalised, synthetic_rollouts

SIZES = {"groups": 3, "rollouts_per_group": 4, "prompt_tokens": 40, "response_tokens": 10}


def test_shape() -> None:
    rollouts = synthetic_rollouts(**SIZES, system_tokens=15, vocab_size=50)
    batch = RolloutBatch(rollouts)
    assert len(batch) == 12 and len(batch.groups()) == 3
    assert batch.token_ids.max() < 50
    first = rollouts[0]
    for rollout in rollouts:
        same_group = rollout.group_id == first.group_id
        shared = np.array_equal(rollout.token_ids[:40], first.token_ids[:40])
        assert shared == same_group
        np.testing.assert_array_equal(rollout.token_ids[:15], first.token_ids[:15])
        np.testing.assert_array_equal(np.flatnonzero(rollout.loss_mask), range(40, len(rollout)))
    short = synthetic_rollouts(**{**SIZES, "rollouts_per_group": 20, "response_tokens": 4})
    assert {len(rollout) - 40 for rollout in short} == {2, 3, 4, 5, 6}


@pytest.mark.parametrize("rewards", [[0.25] * 2, [0.1] * 6, [0.7] * 3])
def test_equal_rewards_have_no_advantage(rewards: list[float]) -> None:
    """Also if their mean is rounded."""
    np.testing.assert_array_equal(normalised(np.array(rewards)), np.zeros(len(rewards)))


def test_seed() -> None:
    first, again, other = (synthetic_rollouts(**SIZES, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("changes", [{"groups": 0}, {"system_tokens": 41}])
def test_refusals(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="system_tokens is"):
        synthetic_rollouts(**{**SIZES, **changes})
