"""Advantage estimates against their definition, and what of rewards and values is refused."""

import math

import numpy as np
import pytest
import torch

from forkpoint import ConfigError, Rollout, RolloutBatch, RolloutError
from forkpoint.losses import gae


def make_batch(seed=0):
    """Masks with gaps, as between turns; one rollout trains nothing, one its last token alone."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for length in (7, 2, 12, 5, 1, 9):
        mask = rng.random(length) < 0.7
        mask[0] = False
        rollouts.append(Rollout(rng.integers(0, 50, length), mask, 0.0))
    rollouts[3] = Rollout([1, 2, 3, 4, 5], [0, 0, 0, 0, 0], 0.0)
    rollouts[1] = Rollout([1, 2], [0, 1], 0.0)
    return RolloutBatch(rollouts)


def make_numbers(batch, seed=0):
    rng = np.random.default_rng(seed + 10)
    rewards = np.where(batch.loss_mask, rng.normal(size=batch.logical_tokens), 0)
    return rng.normal(size=batch.logical_tokens), rewards


def actions(batch):
    """The trained positions of each rollout."""
    for begin, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        yield [t for t in range(begin, end) if batch.loss_mask[t]]


def by_definition(batch, values, rewards, gamma, lam):
    """Eq. 16 as it is written: each advantage a sum over all later temporal differences."""
    advantages = np.zeros(batch.logical_tokens)
    for tokens in actions(batch):
        for first, t in enumerate(tokens):
            for ahead, later in enumerate(tokens[first:]):
                following = tokens[first + ahead + 1 :]
                value_after = values[following[0]] if following else 0.0
                delta = rewards[later] + gamma * value_after - values[later]
                advantages[t] += (gamma * lam) ** ahead * delta
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (0.0, 1.0), (1.0, 0.0)])
def test_equals_its_definition(gamma, lam):
    batch = make_batch()
    values, rewards = make_numbers(batch)
    options = {n: x for n, x in (("gamma", gamma), ("lam", lam)) if x != 1}  # 1 is the default
    found = gae(batch, values, rewards, **options)
    expected = by_definition(batch, values, rewards, gamma, lam)
    np.testing.assert_allclose(found.advantages, expected, atol=1e-12)
    np.testing.assert_allclose(
        found.returns, np.where(batch.loss_mask, expected + values, 0), atol=1e-12
    )
    assert found.advantages.dtype == found.returns.dtype == np.float64


def test_at_lambda_1_returns_are_discounted_rewards_whatever_the_values():
    batch = make_batch()
    values, rewards = make_numbers(batch)
    found = gae(batch, values, rewards, gamma=0.9)
    for tokens in actions(batch):
        for first, t in enumerate(tokens):
            future = sum(0.9**ahead * rewards[u] for ahead, u in enumerate(tokens[first:]))
            assert found.returns[t] == pytest.approx(future, abs=1e-12)


def test_a_reward_per_rollout_is_that_of_its_last_trained_token():
    batch = make_batch()
    values, _ = make_numbers(batch)
    outcomes = np.arange(len(batch)) + 0.5
    per_token = np.zeros(batch.logical_tokens)
    for outcome, tokens in zip(outcomes, actions(batch), strict=True):
        per_token[tokens[-1:]] = outcome
    assert per_token.any()
    for one, other in zip(
        gae(batch, values, outcomes, gamma=0.9, lam=0.8),
        gae(batch, values, per_token, gamma=0.9, lam=0.8),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_tensors_and_lists_are_taken_as_arrays_are():
    batch = make_batch()
    values, rewards = make_numbers(batch)
    values = values.astype(np.float32)
    expected = gae(batch, values, rewards)
    leaf = torch.tensor(values, requires_grad=True)
    found = (
        gae(batch, leaf, torch.tensor(rewards)),
        gae(batch, leaf.repeat_interleave(2)[::2], torch.tensor(rewards, requires_grad=True)),
        gae(batch, values.tolist(), rewards.tolist()),
    )
    for one in found:
        np.testing.assert_array_equal(one.advantages, expected.advantages)
    rounded = torch.tensor(values, dtype=torch.bfloat16)
    np.testing.assert_array_equal(
        gae(batch, rounded, rewards).returns, gae(batch, rounded.double().numpy(), rewards).returns
    )


def test_values_outside_the_mask_do_not_matter():
    batch = make_batch()
    values, rewards = make_numbers(batch)
    expected = gae(batch, values, rewards)
    values[~batch.loss_mask] = math.nan
    np.testing.assert_array_equal(gae(batch, values, rewards).returns, expected.returns)


def test_a_batch_without_trained_tokens():
    batch = RolloutBatch([Rollout([1, 2, 3], [0, 0, 0], 0.0), Rollout([4], [0], 0.0)])
    found = gae(batch, np.ones(4), [1.0, 2.0])
    assert not found.advantages.any() and not found.returns.any()


@pytest.mark.parametrize(
    ("changes", "error", "problem"),
    [
        ({"gamma": 1.1}, ConfigError, "gamma is 1.1; it takes a number from 0 to 1"),
        ({"lam": -0.1}, ConfigError, r"lam is -0\.1; it takes a finite number of at least 0"),
        ({"lam": math.nan}, ConfigError, "lam is nan"),
        ({"values": [1.0]}, RolloutError, r"values has the shape \(1,\), and the batch has 36 tok"),
        ({"rewards": [1.0]}, RolloutError, r"rewards has .* 6 rollouts and 36 tokens; it takes on"),
        ({"rewards": np.ones((6, 1))}, RolloutError, r"rewards has the shape \(6, 1\)"),
        ({"rewards": [1, 2, math.nan, 0, 0, 0]}, RolloutError, "Rollout '2': rewards is nan"),
        ({"rewards": np.ones(36)}, RolloutError, r"Rollout '0', token 0 has the reward 1\.0, but"),
        ({"values": np.full(36, math.inf)}, RolloutError, "Rollout '0', token .*: values is inf"),
    ],
)
def test_refuses(changes, error, problem):
    batch = make_batch()
    values, rewards = make_numbers(batch)
    with pytest.raises(error, match=problem):
        gae(batch, **{"values": values, "rewards": rewards, **changes})
