"""Every loss against its formula in Python loops; additivity over views; what is refused."""

import copy
import math

import numpy as np
import pytest
import torch
from losses_by_loops import (
    CASES,
    LOSSES,
    PAIRS,
    PER_TOKEN,
    assert_equal,
    batch_for,
    evaluate,
    make_batch,
    make_logprobs,
    make_view,
    outputs_for,
    owners,
)
from test_head import SYNCS, Recorder

from forkpoint.errors import RolloutError
from forkpoint.losses import (
    CISPO,
    DPO,
    GRPO,
    GSPO,
    SAPO,
    DrGRPO,
    LogLikelihood,
    SimPO,
    ValueLoss,
    as_loss,
)
from forkpoint.rollouts.batch import Rollout, RolloutBatch


@pytest.mark.parametrize("without", [(), ("old_logprobs", "weights")], ids=["whole", "without"])
@pytest.mark.parametrize(("loss", "by_loops"), CASES, ids=[str(loss) for loss, _ in CASES])
def test_equals_its_formula(loss, by_loops, without):
    batch = batch_for(loss, without=without)
    logprobs_T = make_logprobs(batch)
    expected = by_loops(loss, batch, logprobs_T)
    (expected_grad,) = torch.autograd.grad(expected, logprobs_T)
    assert_equal(evaluate(loss, batch, logprobs_T), (expected.detach(), expected_grad))


def split(batch, rng, labels_N=None):
    """Tokens of three views, by token at random or by the rollouts' labels; one view is empty."""
    count = len(batch.token_ids)
    part_T = rng.integers(0, 3, count) if labels_N is None else labels_N[owners(batch)]
    return [np.flatnonzero(part_T == part) for part in (0, 3, 1, 2)]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_views_sum_to_the_batch(loss):
    batch = batch_for(loss)
    logprobs_T = make_logprobs(batch)
    rng = np.random.default_rng(0)
    labels_N = None if loss.decomposition == "token" else rng.integers(0, 3, 100)
    if labels_N is not None:
        labels_N = labels_N[loss.coupling(batch)]
    parts = split(batch, rng, labels_N)
    assert sum(map(len, parts)) == len(batch.token_ids) and not len(parts[1])
    whole = evaluate(loss, batch, logprobs_T)
    assert_equal(evaluate(loss, batch, logprobs_T, parts), whole)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_what_lies_outside_the_mask_does_not_exist(loss):
    batch = batch_for(loss)
    logprobs_T = make_logprobs(batch)
    expected = evaluate(loss, batch, logprobs_T)
    columns = {
        name: None if (values := getattr(batch, name)) is None else values.copy()
        for name in PER_TOKEN
    }
    for poison in (math.nan, math.inf, -1e30):
        for values in columns.values():
            if values is not None:
                values[~batch.loss_mask] = poison
        poisoned = copy.copy(batch)
        for name, values in columns.items():
            object.__setattr__(poisoned, name, values)
        with torch.autograd.detect_anomaly():  # no NaN on the way either
            actual = evaluate(loss, poisoned, logprobs_T)
        assert_equal(actual, expected)
        assert not actual[1][torch.tensor(~batch.loss_mask)].any()


@pytest.mark.parametrize("loss", [case for case in LOSSES if not isinstance(case, PAIRS)], ids=str)
def test_a_batch_without_trained_tokens_is_zero_not_nan(loss):
    rollouts = [
        Rollout(
            [1, 2, 3],
            [0, 0, 0],
            1.0,
            [0, -1, -1],
            [0, -1, -2],
            rollout_id=name,
            returns=1.0,
            old_values=[0, 1, 2],
        )
        for name in "ab"
    ]
    batch = RolloutBatch(rollouts)
    value, grad_T = evaluate(loss, batch, make_logprobs(batch))
    assert value == 0 and not grad_T.any()


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_float32_stays_float32(loss):
    batch = batch_for(loss)
    logprobs_T = make_logprobs(batch)
    value, grad_T = evaluate(loss, batch, logprobs_T.detach().float().requires_grad_())
    expected, expected_grad = evaluate(loss, batch, logprobs_T)
    torch.testing.assert_close(value.double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(grad_T.double(), expected_grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_host_never_waits_for_values(loss):
    batch = batch_for(loss)
    view, _ = make_view(batch)
    logprobs_T = make_logprobs(batch)
    with Recorder() as recorder:
        loss(outputs_for(loss, logprobs_T), view).backward()
    assert "where" in recorder.names and not recorder.names.keys() & {*SYNCS, "_unique2"}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_cuda_without_syncs(loss):
    batch = batch_for(loss)
    logprobs_T = make_logprobs(batch)
    expected = evaluate(loss, batch, logprobs_T)
    view, _ = make_view(batch, device="cuda")
    leaf_T = logprobs_T.detach().cuda().requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        value = loss(outputs_for(loss, leaf_T), view)
        value.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal((value.detach().cpu(), leaf_T.grad.cpu()), expected)


def test_only_what_is_needed_is_asked_for():
    batch = make_batch(without=("reference_logprobs", "old_logprobs", "weights"))
    for loss in (GRPO(), LogLikelihood(), GSPO(), CISPO(), SAPO(), DrGRPO(max_tokens=3)):
        loss.check(batch)
        assert loss.needs == () and not loss.needs_entropy
    SimPO().check(make_batch(pairs=True, without=("reference_logprobs", "old_logprobs", "weights")))
    assert GRPO(kl=0.1).needs == GSPO(kl=0.1).needs == ("reference_logprobs",)
    assert GRPO(entropy=0.1).needs_entropy and SAPO(entropy=0.1).needs_entropy


def test_a_subclass_keeps_what_it_needs_itself():
    class Own(GRPO):
        needs = ("old_logprobs",)
        needs_entropy = True

    assert Own().needs == ("old_logprobs",) and Own().needs_entropy
    assert Own(kl=0.1).needs == ("old_logprobs", "reference_logprobs")


def test_losses_of_a_critic_say_what_they_miss():
    batch = make_batch(without=("returns", "weights"))
    with pytest.raises(RolloutError, match=r"ValueLoss.*needs returns.*rewards and values"):
        ValueLoss().check(batch)
    batch = make_batch(without=("old_values", "weights"))
    with pytest.raises(RolloutError, match=r"needs old_values.*policy\.score\(batch\)\.values"):
        ValueLoss().check(batch)
    ValueLoss(clip=math.inf).check(batch)
    with pytest.raises(RolloutError, match="weights, which ValueLoss"):
        ValueLoss().check(make_batch())


def pair(advantages=(1.0, 0.0), masks=([0, 1, 1], [0, 1, 1]), group_id="g"):
    return [
        Rollout([1, 2, 3], mask, advantage, reference_logprobs=[0, -1, -1], group_id=group_id)
        for advantage, mask in zip(advantages, masks, strict=True)
    ]


@pytest.mark.parametrize(
    ("rollouts", "problem"),
    [
        ([*pair(group_id="a"), *pair()[:1]], r"Group g \('2'\): .*exactly two .*not 1"),
        ([*pair(), *pair()[:1]], r"Group g \('0', '1', '2'\): .*exactly two .*not 3"),
        (pair((0.1, 0.1 + 1e-12)), "twice"),
        (pair(([0, 1, 2], 0.5)), r"Group g .*'0' has advantages that differ"),
        (pair(masks=([0, 1, 1], [0, 0, 0])), r"Group g .*'1' has no trained tokens"),
    ],
)
def test_losses_of_pairs_refuse_what_is_no_pair(rollouts, problem):
    for loss in (DPO(), SimPO()):
        with pytest.raises(RolloutError, match=problem) as error:
            loss.check(RolloutBatch(rollouts))
        assert type(loss).__name__ in str(error.value)


def test_dpo_takes_advantages_that_differ_only_outside_the_mask():
    DPO().check(RolloutBatch(pair(([9, 1, 1], 0.0))))


def test_coupling():
    batch = make_batch(pairs=True)
    assert GRPO().coupling(batch).tolist() == GSPO().coupling(batch).tolist() == [0, 1, 2, 3, 4, 5]
    assert DPO().coupling(batch).tolist() == [0, 1, 2, 0, 1, 2]
    assert SimPO().coupling(batch).tolist() == [0, 1, 2, 0, 1, 2]
    assert (
        as_loss(lambda outputs, batch: outputs.logprobs.sum()).coupling(batch).tolist() == [0] * 6
    )
    for loss in (GRPO(), DPO(), GSPO()):
        assert loss.coupling(batch).dtype == np.int64


def test_as_loss_keeps_a_loss_and_wraps_a_function():
    loss = GRPO()
    assert as_loss(loss) is loss
    wrapped = as_loss(lambda outputs, batch: (outputs.logprobs * batch.advantages).sum())
    assert wrapped.decomposition == "joint" and not wrapped.needs_entropy
    batch = make_batch()
    value, _ = evaluate(wrapped, batch, logprobs_T := make_logprobs(batch))
    expected = logprobs_T.detach() @ torch.tensor(batch.advantages)
    torch.testing.assert_close(value, expected)
