"""Arguments of a policy's calls, and messages besides results."""

import copy
import logging
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from steps import ACROSS, clear_gradients, forked_batch, gradients, small_model
from torch import Tensor

from forkpoint import Policy, Rollout, RolloutBatch, losses, wrap
from forkpoint.errors import ConfigError, RolloutError, UnsupportedError
from forkpoint.losses import DPO, GRPO, Distillation, FunctionLoss, Loss, LossBatch, LossOutputs

BATCH = forked_batch()


@pytest.fixture(scope="module")
def policy() -> Policy:
    return wrap(small_model("llama"), ACROSS)


@pytest.mark.parametrize("kind", [list, tuple])
def test_calls_take_a_list_of_rollouts(policy: Policy, kind: Any) -> None:
    rollouts = kind(BATCH)
    model = policy.host.model
    policy.forward_backward(BATCH, losses.GRPO())
    wanted = gradients(model)
    clear_gradients(model)
    stats = policy.forward_backward(rollouts, losses.GRPO(), plan=policy.plan(rollouts))
    found = gradients(model)
    assert all(torch.equal(g, found[n]) for n, g in wanted.items() if g is not None)  # type: ignore[arg-type]
    assert torch.equal(policy.score(rollouts).logprobs, stats.logprobs)
    clear_gradients(model)
    policy.logprobs(rollouts).sum().backward()
    assert policy.verify(rollouts, losses.GRPO()).passed
    clear_gradients(model)


@pytest.mark.parametrize("given", ["rollouts.jsonl", None, [[1, 2]]])
def test_what_calls_do_not_take(policy: Policy, given: Any) -> None:
    for call in (
        policy.score,
        policy.plan,
        policy.logprobs,
        lambda x: policy.forward_backward(x, losses.GRPO()),
        lambda x: policy.verify(x, losses.GRPO()),
    ):
        with pytest.raises(RolloutError, match=r"a batch takes Rollout|list of Rollout objects"):
            call(given)


def test_copies(policy: Policy) -> None:
    for call in (copy.deepcopy, pickle.dumps, lambda x: copy.deepcopy({"policy": [x]})):
        with pytest.raises(UnsupportedError, match=r"forkpoint.wrap\(copy.deepcopy\(model\)"):
            call(policy)
    twin = copy.copy(policy)
    assert twin.host is policy.host and twin.config == policy.config


# Fields that are None
# ------------------------------------------------------------


def by_attribute(outputs: LossOutputs, batch: LossBatch) -> Tensor:
    return batch.reference_logprobs.sum()  # type: ignore[union-attr]


def by_index(outputs: LossOutputs, batch: LossBatch) -> Tensor:
    return (outputs.logprobs[batch.loss_mask] - batch.old_logprobs[batch.loss_mask]).sum()  # type: ignore[index]


def squared_entropy(outputs: LossOutputs, batch: LossBatch) -> Tensor:
    return outputs.entropies.square().sum() + outputs.logprobs.sum()  # type: ignore[union-attr]


def sum_with(loss: Loss) -> Any:
    def summed(outputs: LossOutputs, batch: LossBatch) -> Tensor:
        return loss(outputs, batch) + outputs.logprobs.sum()

    return summed


PLAIN = [
    Rollout(r.token_ids, r.loss_mask, r.advantage, rollout_id=r.rollout_id, group_id=r.group_id)
    for r in BATCH
]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (by_attribute, "batch.reference_logprobs, which is None"),
        (by_index, "batch.old_logprobs, which is None"),
        (squared_entropy, "outputs.entropies, which is None because it does not ask"),
        (sum_with(GRPO(entropy=0.1)), "outputs.entropies, which is None because it does not ask"),
        (sum_with(GRPO(kl=0.1)), "batch.reference_logprobs, which is None"),
        (sum_with(Distillation()), "batch.reference_logprobs, which is None"),
        (sum_with(DPO()), "batch.reference_logprobs, which is None"),
    ],
)
def test_fields_that_are_none_are_named(policy: Policy, loss: Any, message: str) -> None:
    for call in (policy.forward_backward, policy.verify):
        with pytest.raises(ConfigError, match=message):
            call(PLAIN, loss)
    assert all(p.grad is None for p in policy.host.model.parameters())


@pytest.mark.parametrize("function", [3, GRPO])
def test_what_is_no_function(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"the function of FunctionLoss is .*takes a function of"):
        FunctionLoss(function)


def test_other_errors_of_a_loss_stay_python_s(policy: Policy) -> None:
    def failing(outputs: LossOutputs, batch: LossBatch) -> Tensor:
        return outputs.logprobs + {}  # type: ignore[operator]

    def of_its_own(outputs: LossOutputs, batch: LossBatch) -> Tensor:
        nothing: Any = None
        return outputs.logprobs - nothing if batch.old_logprobs is None else outputs.logprobs.sum()

    with pytest.raises(TypeError, match="dict"):
        policy.forward_backward(PLAIN, failing)
    with pytest.raises(TypeError, match="NoneType"):
        policy.forward_backward(BATCH, lambda outputs, batch: outputs.logprobs - None)  # type: ignore[operator]


# Ratios
# ------------------------------------------------------------


def with_old(policy: Policy, shift: float) -> list[Rollout]:
    """With the model's log-probs, but for one token of each rollout, which are off."""
    own = policy.score(BATCH).logprobs.cpu().numpy()
    found = []
    for rollout, begin, end in zip(BATCH, BATCH.offsets, BATCH.offsets[1:], strict=False):
        old = np.minimum(own[begin:end], 0)
        old[-1] += shift
        found.append(replace(rollout, old_logprobs=old))
    return found


@pytest.mark.parametrize("shift", [-5.5, -4.5])
def test_large_ratios_are_warned_of_once(shift: float, caplog: pytest.LogCaptureFixture) -> None:
    policy = wrap(small_model("llama"), ACROSS)
    rollouts = with_old(policy, shift)
    with caplog.at_level(logging.WARNING, logger="forkpoint"):
        policy.forward_backward(PLAIN, losses.GRPO())
        stats = policy.forward_backward(rollouts, losses.GRPO())
        policy.with_config(sharing="none").forward_backward(rollouts, losses.GSPO())
    found = [record.getMessage() for record in caplog.records]
    if shift > -5:
        assert not found
        return
    (message,) = found
    trained = int(RolloutBatch(rollouts).loss_mask.sum())
    assert message.startswith(f"{len(BATCH)} of {trained} trained tokens have a ratio of e^5")
    assert "the largest is e^5.5" in message and "temperature" in message
    assert isinstance(stats.loss, float)


def test_ratios_of_rollouts_that_did_not_run(caplog: pytest.LogCaptureFixture) -> None:
    """Those of equal rewards have no log-probs; the others are compared."""
    policy = wrap(small_model("llama"), ACROSS)
    rollouts = with_old(policy, -6.0)
    rollouts[:6] = [replace(rollout, advantage=0.0) for rollout in rollouts[:6]]
    with caplog.at_level(logging.WARNING, logger="forkpoint"):
        stats = policy.forward_backward(rollouts, losses.GRPO())
    assert bool(stats.logprobs.isnan().any())
    (record,) = caplog.records
    assert record.getMessage().startswith("6 of ") and "e^6.0" in record.getMessage()
