"""Importance weights from sampler to trainer, against loops; where they act in a loss."""

import dataclasses
import math
from itertools import product

import numpy as np
import pytest
import torch
from losses_by_loops import assert_equal, each_rollout, evaluate, make_batch, make_logprobs

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.losses import GRPO, importance_weights
from forkpoint.rollouts.batch import Rollout, RolloutBatch


def sampled(batch, seed=0):
    """Log-probs of a sampler near the trainer's; not numbers where nothing is trained."""
    noise = np.random.default_rng(seed).normal(0, 0.5, len(batch.token_ids))
    return np.where(batch.loss_mask, np.minimum(batch.old_logprobs + noise, 0), math.nan)


def by_loops(batch, sampler_T, mode, level, cap, floor):
    weights = [1.0] * len(batch.token_ids)
    for _, tokens in each_rollout(batch):
        ratios = {t: math.exp(batch.old_logprobs[t] - sampler_T[t]) for t in tokens}
        for t in tokens:
            ratio = math.prod(ratios.values()) if level == "sequence" else ratios[t]
            if mode == "truncate":
                weights[t] = min(max(ratio, floor), cap)
            else:
                weights[t] = ratio if floor <= ratio <= cap else 0.0
    return weights


@pytest.mark.parametrize("bounds", [(2.0, 0.0), (1.3, 0.0), (1.3, 0.8), (math.inf, 0.0)])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_equals_its_formula(mode, level, bounds):
    cap, floor = bounds
    batch = make_batch(1)
    sampler_T = sampled(batch)
    found = importance_weights(batch, sampler_T, mode=mode, level=level, cap=cap, floor=floor)
    assert found.dtype == np.float64 and found.shape == batch.token_ids.shape
    np.testing.assert_allclose(
        found, by_loops(batch, sampler_T, mode, level, cap, floor), rtol=1e-12, atol=0
    )
    if cap == 1.3:
        assert (found[batch.loss_mask] == (cap if mode == "truncate" else 0)).any()


def test_the_same_probabilities_weigh_1():
    batch = make_batch()
    for level, mode in product(("token", "sequence"), ("truncate", "mask")):  # at both bounds
        found = importance_weights(
            batch, batch.old_logprobs, mode=mode, level=level, cap=1.0, floor=1.0
        )
        assert (found == 1).all()


def test_a_long_rollout_does_not_overflow():
    count = 2000
    batch = RolloutBatch([Rollout([1] * count, [0] + [1] * (count - 1), 1.0, [-1.0] * count)])
    for difference, bound in ((1.0, 2.0), (-1.0, 0.0)):
        found = importance_weights(batch, [-1.0 - difference] * count, level="sequence")
        assert (found[1:] == bound).all()
        found = importance_weights(
            batch, [-1.0 - difference] * count, level="sequence", mode="mask"
        )
        assert (found[1:] == 0).all()


def test_as_weights_they_multiply_the_policy_term_and_not_the_kl():
    """-w * min(r * A, ...) + kl * k3, over all trained tokens, those of weight 0 included."""
    batch = make_batch(1, without=("weights",))
    weights_T = importance_weights(batch, sampled(batch), mode="mask", cap=1.3)
    weighted = RolloutBatch(
        dataclasses.replace(rollout, weights=weights_T[begin:end])
        for rollout, begin, end in zip(batch, batch.offsets, batch.offsets[1:], strict=False)
    )
    logprobs_T = make_logprobs(batch)
    expected = 0.0
    for _, tokens in each_rollout(batch):
        for t in tokens:
            ratio = math.exp(logprobs_T[t].item() - batch.old_logprobs[t])
            worth = min(
                ratio * batch.advantages[t], min(max(ratio, 0.8), 1.2) * batch.advantages[t]
            )
            x = batch.reference_logprobs[t] - logprobs_T[t].item()
            expected += -weights_T[t] * worth + 0.1 * (math.exp(x) - x - 1)
    value, _ = evaluate(GRPO(kl=0.1), weighted, logprobs_T)
    assert_equal((value,), (value.new_tensor(expected / batch.loss_mask.sum()),))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"mode": "clip"}, "mode is 'clip'; allowed are 'truncate', 'mask'"),
        ({"level": "group"}, "level is 'group'; allowed are 'token', 'sequence'"),
        ({"cap": 0}, "cap is 0; it takes a number above 0"),
        ({"floor": -1}, "floor is -1; it takes a finite number of at least 0"),
    ],
)
def test_arguments_that_are_not_allowed(arguments, problem):
    batch = make_batch()
    with pytest.raises(ConfigError, match=problem):
        importance_weights(batch, batch.old_logprobs, **arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_tensors_and_lists_are_taken_as_arrays_are(dtype):
    batch = make_batch()
    sampler_T = torch.tensor(batch.old_logprobs - 0.1).to(dtype)
    expected = importance_weights(batch, sampler_T.double().numpy())
    leaf = sampler_T.clone() if dtype.itemsize == 1 else sampler_T.clone().requires_grad_()
    unread = [x if m else None for x, m in zip(sampler_T.tolist(), batch.loss_mask, strict=True)]
    for given in (leaf, leaf.repeat_interleave(2)[::2], unread):
        np.testing.assert_array_equal(importance_weights(batch, given), expected)
    assert (expected != 1).any()


def test_what_is_no_numbers_is_refused():
    batch = make_batch()
    for given in (["x"] * len(batch.token_ids), [[1.0], [1.0, 2.0]], {"a": 1}):
        with pytest.raises(RolloutError, match=r"sampler_logprobs is .*cannot be read as numbers"):
            importance_weights(batch, given)
    with pytest.raises(RolloutError, match=r"sampler_logprobs is a Tensor.*cannot be read.*dense"):
        importance_weights(batch, torch.zeros(len(batch.token_ids)).to_sparse())


def test_batches_that_do_not_fit():
    batch = make_batch()
    sampler_T = batch.old_logprobs.copy()
    position = int(np.flatnonzero(batch.loss_mask)[-1])
    sampler_T[position] = math.nan
    rollout = int(np.searchsorted(batch.offsets, position, side="right")) - 1
    token = position - batch.offsets[rollout]
    problem = f"Rollout 'r{rollout}', token {token}: sampler_logprobs is nan"
    with pytest.raises(RolloutError, match=problem):
        importance_weights(batch, sampler_T)


def test_probabilities_are_no_log_probs():
    batch = RolloutBatch([Rollout([1, 2, 3], [0, 1, 1], 1.0, [0, -1.0, -2.0], rollout_id="a")])
    for probabilities in ([1.0, 0.25, 0.01], [1.0, 0.01, 0.25], [0.0, 1.0, 2.0]):
        with pytest.raises(
            RolloutError, match=r"'a', token [12]: sampler_logprobs is .* Give log-probs"
        ):
            importance_weights(batch, probabilities)
    # Untrained entries are not read, and rounding to 16 bits may lift a log-prob above 0.
    assert importance_weights(batch, [9.0, 0.125, -2.0]).tolist() == [1, math.exp(-1.125), 1]
