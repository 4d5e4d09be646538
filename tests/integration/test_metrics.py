"""stats.metrics() against loops over tokens, and RolloutBatch.with_."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from steps import ACROSS, forked_batch, small_model

from forkpoint import RolloutBatch, RolloutError, StepStats, wrap
from forkpoint.losses import CISPO, GMPO, GRPO, GSPO, SAPO, SFT, ValueLoss
from forkpoint.testing import tiny_model

BATCH = forked_batch()
SHAPES = [
    *("given_tokens", "computed_tokens", "bound", "step_ms"),
    *("trained_tokens", "averaged_tokens"),
]


def off_policy(model: Any, batch: RolloutBatch) -> RolloutBatch:
    """Old log-probs that are off by up to 0.5, so that some ratios are clipped."""
    logprobs = wrap(model).score(batch).logprobs
    noise = np.random.default_rng(1).uniform(-0.5, 0.5, len(logprobs))
    old = np.minimum(logprobs.numpy() + noise, 0)
    return batch.with_(old_logprobs=old, reference_logprobs=old - 0.1)


def rows(stats: StepStats, batch: RolloutBatch) -> list[list[tuple[float, float, float]]]:
    """By rollout: log-ratio, log-ratio to the reference, and advantage of its trained tokens."""
    new = stats.logprobs.tolist()
    assert batch.old_logprobs is not None and batch.reference_logprobs is not None
    return [
        [
            (new[t] - batch.old_logprobs[t], batch.reference_logprobs[t] - new[t], a)
            for t in range(begin, end)
            if batch.loss_mask[t] and not math.isnan(new[t])
            for a in [batch.advantages[t]]
        ]
        for begin, end in zip(batch.offsets, batch.offsets[1:], strict=False)
    ]


def grpo_clips(row: list[tuple[float, float, float]]) -> list[bool]:
    ratios = [(math.exp(d), a) for d, _, a in row]
    return [(a > 0 and r > 1.2) or (a < 0 and (r < 0.8 or r > 1.5)) for r, a in ratios]


def gspo_clips(row: list[tuple[float, float, float]]) -> list[bool]:
    ratio = math.exp(sum(d for d, *_ in row) / len(row))
    a = row[0][2]
    return [(a > 0 and ratio > 1.05) or (a < 0 and ratio < 0.95)] * len(row)


def cispo_clips(row: list[tuple[float, float, float]]) -> list[bool]:
    return [math.exp(d) > 1.3 for d, *_ in row]


def gmpo_clips(row: list[tuple[float, float, float]]) -> list[bool]:
    return [(a > 0 and d > 0.2) or (a < 0 and d < -0.2) for d, _, a in row]


def test_under_inference_mode() -> None:
    model = small_model("qwen3")
    stats = wrap(model).forward_backward(off_policy(model, BATCH), GRPO(clip=0.01))
    with torch.inference_mode():
        found = stats.metrics()
    assert found == stats.metrics() and found["clip_fraction"] > 0


@pytest.mark.parametrize("left_out", [False, True])
@pytest.mark.parametrize(
    ("loss", "clips"),
    [
        (GRPO(clip=0.2, dual_clip=1.5), grpo_clips),
        (GSPO(clip=0.05, clip_high=0.05), gspo_clips),
        (CISPO(clip_high=0.3), cispo_clips),
        (GMPO(clip=0.2), gmpo_clips),
    ],
    ids=["GRPO", "GSPO", "CISPO", "GMPO"],
)
def test_metrics_are_those_of_a_loop(loss: Any, clips: Any, left_out: bool) -> None:
    model = small_model("llama")
    batch = off_policy(model, BATCH)
    if left_out:
        rewards = [0.0 if n in (1, 7) else a.advantage for n, a in enumerate(batch)]
        batch = batch.with_(advantages=rewards)
    stats = wrap(model, ACROSS).forward_backward(batch, loss)
    found, by_rollout = stats.metrics(), rows(stats, batch)
    tokens = [token for row in by_rollout for token in row]
    assert (len(tokens) < batch.trained_tokens) == left_out
    clipped = sum(sum(clips(row)) for row in by_rollout if row)
    assert 0 < clipped < len(tokens)
    ratios = [math.exp(d) for d, *_ in tokens]
    wanted = {
        "loss": stats.loss,
        "ratio_mean": sum(ratios) / len(tokens),
        "ratio_max": max(ratios),
        "approx_kl": sum(r - 1 - math.log(r) for r in ratios) / len(tokens),
        "reference_kl": sum(math.exp(x) - 1 - x for _, x, _ in tokens) / len(tokens),
        "clip_fraction": clipped / len(tokens),
        "trained_tokens": batch.trained_tokens,
        "averaged_tokens": len(tokens),
        "computed_tokens": stats.computed_tokens,
        "step_ms": sum(stats.phase_ms.values()),
    }
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-10, abs=1e-13), name
    assert all(type(value) is float and math.isfinite(value) for value in found.values())


def test_metrics_follow_what_was_asked_for() -> None:
    policy = wrap(small_model("llama"))
    plain = [replace(x, old_logprobs=None, reference_logprobs=None) for x in BATCH]
    found = policy.forward_backward(plain, SFT()).metrics()
    assert {*SHAPES, "loss", "logprob"} <= set(found)
    assert not {"ratio_mean", "clip_fraction", "approx_kl", "entropy"} & set(found)
    stats = policy.forward_backward(BATCH, GRPO(entropy=0.01))
    assert stats.entropies is not None
    entropy = stats.entropies[torch.tensor(BATCH.loss_mask)].mean()
    assert stats.metrics()["entropy"] == pytest.approx(float(entropy), rel=1e-10)
    critic = wrap(tiny_model("llama", critic=True))
    values = BATCH.with_(returns=[1.0] * len(BATCH), old_values=np.zeros(BATCH.logical_tokens))
    assert {"value", "loss"} <= set(critic.forward_backward(values, ValueLoss()).metrics())


@pytest.mark.parametrize("trained", [False, True])
def test_no_means_without_tokens_that_ran(trained: bool) -> None:
    """Of rollouts without trained tokens, or without an advantage: 0 would be a wrong mean."""
    model = small_model("llama")
    batch = off_policy(model, BATCH).with_(advantages=[0.0] * len(BATCH))
    rollouts = list(batch) if trained else [replace(x, loss_mask=[0] * len(x)) for x in batch]
    found = wrap(model).forward_backward(rollouts, GRPO()).metrics()
    assert found["averaged_tokens"] == 0
    assert found["trained_tokens"] == (batch.trained_tokens if trained else 0)
    assert not {"logprob", "ratio_mean", "approx_kl", "reference_kl", "clip_fraction"} & set(found)


def test_metrics_of_logprobs_that_are_nan() -> None:
    """A model that has diverged shows NaN, and not the metrics of tokens that did not run."""
    model = small_model("llama")
    batch = off_policy(model, BATCH)
    with torch.no_grad():
        next(model.parameters())[:] = torch.nan
    found = wrap(model).forward_backward(batch, GRPO(kl=0.1)).metrics()
    of_policy = ["loss", "logprob", "ratio_mean", "ratio_max", "approx_kl", "reference_kl"]
    assert all(math.isnan(found[name]) for name in of_policy)


def test_metrics_of_an_objective_without_logprobs() -> None:
    class KLAlone(GRPO):
        def objective(self, logprobs_T: torch.Tensor, batch: Any) -> torch.Tensor:
            return torch.zeros_like(logprobs_T)

    model = small_model("llama")
    stats = wrap(model).forward_backward(off_policy(model, BATCH), KLAlone(kl=0.1))
    assert stats.metrics()["clip_fraction"] == 0


def test_a_step_does_not_compute_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("forkpoint.step.results.policy_metrics", called)
    stats = wrap(small_model("llama")).forward_backward(BATCH, GRPO())
    with pytest.raises(AssertionError):
        stats.metrics()


def test_a_batch_with_other_fields() -> None:
    tokens, count = BATCH.logical_tokens, len(BATCH)
    values = -torch.rand(tokens, dtype=torch.float64)
    found = BATCH.with_(
        old_logprobs=None, reference_logprobs=values, advantages=range(count), weights=[2.0] * count
    )
    assert found.old_logprobs is None and found.rollout_ids == BATCH.rollout_ids
    assert found.reference_logprobs is not None and found.weights is not None
    mask = BATCH.loss_mask
    np.testing.assert_array_equal(found.reference_logprobs[mask], values.numpy()[mask])
    np.testing.assert_array_equal(found.advantages, np.repeat(np.arange(count), BATCH.lengths))
    np.testing.assert_array_equal(found.group_index, BATCH.group_index)
    tensors = RolloutBatch.from_completions([[5, 6]], [[1, 1]], [[7, 8, 0]], [[1, 1, 0]])
    scored = tensors.with_(advantages=[1.0])
    assert scored.has_advantages and not tensors.has_advantages
    assert scored.to_completions(scored.token_ids).tolist() == [[7, 8, 0]]
    assert len(RolloutBatch([]).with_(old_logprobs=[])) == 0


def test_what_a_batch_does_not_take() -> None:
    for fields in (
        {"old_logprobs": [-1.0] * len(BATCH)},  # one per rollout
        {"weights": [1.0] * 3},
        {"old_logprobs": [float("nan")] * BATCH.logical_tokens},
        {"advantages": None},
    ):
        with pytest.raises(RolloutError):
            BATCH.with_(**fields)
    with pytest.raises(TypeError, match="reference"):
        BATCH.with_(reference=[1.0])


def test_a_loss_of_zero_is_explained() -> None:
    """Ratios of 1 and advantages that cancel; not another loss, nor one that is small otherwise."""
    model = small_model("llama")
    policy = wrap(model)

    def shown(batch: RolloutBatch, loss: Any) -> bool:
        return "on-policy advantages sum to 0" in repr(policy.forward_backward(batch, loss))

    signs = np.where(np.arange(BATCH.trained_tokens) % 2, 1.0, -1.0)
    signs[-1] -= signs.sum()
    advantages = np.zeros(BATCH.logical_tokens)
    advantages[BATCH.loss_mask] = signs
    centred = BATCH.with_(advantages=advantages, old_logprobs=None)
    assert shown(centred, GRPO())
    assert not shown(centred.with_(advantages=advantages + 1e-3), GRPO())
    assert shown(centred, SAPO(normalize="token", tau_neg=1.0)) and not shown(centred, CISPO())
    assert not shown(centred, lambda outputs, batch: 0 * outputs.logprobs.sum())
    assert not shown(off_policy(model, centred), GRPO())
