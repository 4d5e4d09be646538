"""Promises of the losses beyond their formulas: which are the same, and what they estimate."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from losses_by_loops import (
    assert_equal,
    batch_for,
    entropies_of,
    evaluate,
    make_batch,
    make_denominators,
    make_logprobs,
    make_view,
    owners,
)

import forkpoint
from forkpoint.losses import (
    BNPO,
    CISPO,
    DAPO,
    DPO,
    GMPO,
    GRPO,
    GSPO,
    PPO,
    SAPO,
    SFT,
    Denominators,
    Distillation,
    DrGRPO,
    LogLikelihood,
    LossOutputs,
    SimPO,
)
from forkpoint.losses.base import as_loss
from forkpoint.losses.policy_loss import kl_terms
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.testing import dense_run, lifted_upcasts, tiny_model


def constant_advantages(batch):
    """The same rollouts, each with one advantage for all of its tokens."""
    return RolloutBatch(
        dataclasses.replace(rollout, advantage=float(n) - 3.5) for n, rollout in enumerate(batch)
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (DAPO(), GRPO(clip_high=0.28)),
        (PPO(clip=0.1), GRPO(clip=0.1)),
        (BNPO(kl=0.1), GRPO(kl=0.1)),
        (DPO(variant="robust"), DPO()),
        (DPO(label_smoothing=0.0), DPO()),
    ],
    ids=str,
)
def test_names_of_one_loss(one, other):
    batch = batch_for(one)
    logprobs_T = make_logprobs(batch)
    assert_equal(evaluate(one, batch, logprobs_T), evaluate(other, batch, logprobs_T))
    assert SFT is LogLikelihood


def test_bnpo_is_cut_as_trl_cuts_it_by_denominators_and_scale():
    batch = make_batch(without=("weights",))
    logprobs_T = make_logprobs(batch)
    halves = [np.flatnonzero(owners(batch) < 4), np.flatnonzero(owners(batch) >= 4)]
    expected = torch.zeros((), dtype=torch.float64)
    actual = torch.zeros((), dtype=torch.float64)
    for half in halves:
        view, indices = make_view(batch, half)
        own = Denominators(tokens=float(view.loss_mask.sum()), rollouts=4.0, groups=3.0)
        view, _ = make_view(batch, half, denominators=own)
        actual += BNPO()(LossOutputs(logprobs=logprobs_T[indices]), view).detach() / 2
        terms = []
        for t in half[batch.loss_mask[half]]:
            ratio = float((logprobs_T[t].detach() - batch.old_logprobs[t]).exp())
            advantage = batch.advantages[t]
            terms.append(-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage))
        expected += sum(terms) / len(terms) / 2
    assert_equal((actual,), (expected,))
    whole, _ = evaluate(BNPO(), batch, logprobs_T)
    assert abs(whole - expected) > 1e-3  # the cut matters, which is why it is not ours


def test_dr_grpo_does_not_see_how_long_a_rollout_is():
    rollouts = [Rollout([1] * (n + 1), [0] + [1] * n, 1.0) for n in (1, 5)]
    batch = RolloutBatch(rollouts)
    logprobs_T = torch.zeros(len(batch.token_ids), dtype=torch.float64, requires_grad=True)
    _, grad_T = evaluate(DrGRPO(max_tokens=10), batch, logprobs_T)
    assert grad_T[torch.tensor(batch.loss_mask)].tolist() == [-1 / 20] * 6
    full = RolloutBatch([Rollout([1] * 5, [0] + [1] * 4, a, rollout_id=f"{a}") for a in (1.0, 2.0)])
    logprobs_T = make_logprobs(full)
    same = evaluate(DrGRPO(max_tokens=4), full, logprobs_T)
    assert_equal(same, evaluate(GRPO(normalize="rollout"), full, logprobs_T))


def test_gspo_token_is_gspo_where_a_rollout_has_one_advantage():
    batch = constant_advantages(make_batch(without=("weights",)))
    logprobs_T = make_logprobs(batch)
    clips = {"clip": 0.05, "clip_high": 0.1}
    one, other = (
        evaluate(GSPO(**clips, level=level), batch, logprobs_T) for level in ("sequence", "token")
    )
    assert_equal(one, other)
    uneven = make_batch(without=("weights",))
    grads = [
        evaluate(GSPO(**clips, level=level), uneven, make_logprobs(uneven))[1]
        for level in ("sequence", "token")
    ]
    assert (grads[0] - grads[1]).abs().max() > 1e-3


@pytest.mark.parametrize("loss", [CISPO(), GSPO(level="token"), SAPO(normalize="token"), DAPO()])
def test_on_policy_every_policy_loss_is_the_policy_gradient(loss):
    batch = make_batch(without=("old_logprobs", "weights"))
    _, grad_T = evaluate(loss, batch, make_logprobs(batch))
    expected_T = -batch.advantages * batch.loss_mask
    if loss.normalize == "token":
        expected_T = expected_T / batch.loss_mask.sum()
    else:
        trained = np.bincount(owners(batch), batch.loss_mask)
        expected_T = expected_T / trained.clip(min=1)[owners(batch)] / len(trained)
    assert_equal((grad_T,), (torch.tensor(expected_T),))


def test_unclipped_cispo_has_the_gradient_of_the_unclipped_ratio():
    batch = make_batch()
    logprobs_T = make_logprobs(batch)
    _, one = evaluate(CISPO(clip_high=math.inf), batch, logprobs_T)
    _, other = evaluate(GRPO(clip=math.inf), batch, logprobs_T)
    assert_equal((one,), (other,))


def test_cispo_keeps_the_gradient_that_a_clip_takes():
    batch = RolloutBatch([Rollout([1, 2], [0, 1], 1.0, old_logprobs=[0, -5.0])])
    logprobs_T = torch.tensor([0.0, -1.0], dtype=torch.float64, requires_grad=True)
    assert evaluate(GRPO(), batch, logprobs_T)[1].tolist() == [0, 0]
    assert evaluate(CISPO(clip_high=4.0), batch, logprobs_T)[1].tolist() == [0, -5]


def test_dual_clip_ends_the_gradient_of_bad_tokens_that_became_likely():
    batch = RolloutBatch([Rollout([1, 2], [0, 1], -1.0, old_logprobs=[0, -5.0])])
    logprobs_T = torch.tensor([0.0, -1.0], dtype=torch.float64, requires_grad=True)
    value, grad_T = evaluate(GRPO(), batch, logprobs_T)
    assert value == grad_T[1] == pytest.approx(math.exp(4))
    value, grad_T = evaluate(GRPO(dual_clip=3), batch, logprobs_T)
    assert value == 3 and not grad_T.any()


def test_weights_are_those_of_the_policy_term_alone():
    batch = make_batch()
    unweighted = RolloutBatch(dataclasses.replace(r, weights=None) for r in batch)
    none = RolloutBatch(dataclasses.replace(r, weights=0.0) for r in batch)
    logprobs_T = make_logprobs(batch)
    rest = {"kl": 0.3, "entropy": 0.2}
    for make in (GRPO, CISPO, SAPO, GSPO):
        value, grad_T = evaluate(make(**rest), unweighted, logprobs_T)
        policy, policy_grad_T = evaluate(make(), unweighted, logprobs_T)
        expected = (value - policy, grad_T - policy_grad_T)
        assert expected[1].abs().max() > 1e-3
        assert_equal(evaluate(make(**rest), none, logprobs_T), expected)


def test_entropy_is_that_of_the_outputs():
    batch = make_batch()
    view, _ = make_view(batch)
    logprobs_T = make_logprobs(batch).detach()
    entropies_T = entropies_of(logprobs_T).requires_grad_()
    value = GRPO(entropy=0.5)(LossOutputs(logprobs=logprobs_T, entropies=entropies_T), view)
    (grad_T,) = torch.autograd.grad(value, entropies_T)
    expected_T = -0.5 * torch.tensor(batch.loss_mask / batch.loss_mask.sum())
    assert_equal((grad_T,), (expected_T,))


# Expectations over a whole vocabulary, exactly ----------------------------------------------------

STUDENT = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64)
SAMPLER = torch.tensor([0.1, -0.4, 0.2, 0.5], dtype=torch.float64)
TEACHER = torch.tensor([-0.5, 0.4, 0.9, 0.0], dtype=torch.float64).log_softmax(0)


def gradient(value, leaf):
    return torch.autograd.grad(value, leaf, retain_graph=True)[0]


def divergence(one_V, other_V):
    return (one_V.exp() * (one_V - other_V)).sum()


def test_what_the_kl_estimators_estimate():
    """Values: k1 and k3 the reverse KL. Gradients: k1 none, k2 the reverse, k3 the forward KL's."""
    leaf = STUDENT.clone().requires_grad_()
    student_V = leaf.log_softmax(0)
    probabilities_V = student_V.exp().detach()
    reverse, forward = divergence(student_V, TEACHER), divergence(TEACHER, student_V)
    gradients = {
        "k1": torch.zeros(4, dtype=torch.float64),
        "k2": gradient(reverse, leaf),
        "k3": gradient(forward, leaf),
    }
    for name, expected_V in gradients.items():
        mean = (probabilities_V * kl_terms(TEACHER - student_V, name)).sum()
        assert_equal((gradient(mean, leaf),), (expected_V,))
        if name != "k2":
            assert_equal((mean.detach(),), (reverse.detach(),))


@pytest.mark.parametrize(
    ("direction", "sampler"),
    [("reverse", STUDENT), ("reverse", SAMPLER), ("forward", TEACHER)],
    ids=["reverse on-policy", "reverse off-policy", "forward"],
)
def test_distillation_is_the_divergence(direction, sampler):
    """One rollout per token of the vocabulary, weighted with how often it would be sampled."""
    sampled_V = sampler.log_softmax(0)
    batch = RolloutBatch(
        Rollout(
            [0, v],
            [0, 1],
            0.0,
            old_logprobs=[0, float(sampled_V[v])],
            reference_logprobs=[0, float(TEACHER[v])],
            weights=4 * float(sampled_V[v].exp()),
        )
        for v in range(4)
    )
    leaf = STUDENT.clone().requires_grad_()
    student_V = leaf.log_softmax(0)
    logprobs_T = torch.stack([student_V.new_zeros(4), student_V], dim=1).flatten()
    value = Distillation(direction=direction)(LossOutputs(logprobs=logprobs_T), make_view(batch)[0])
    pair = (student_V, TEACHER) if direction == "reverse" else (TEACHER, student_V)
    exact = divergence(*pair)
    assert_equal((value.detach(),), (exact.detach(),))
    assert_equal((gradient(value, leaf),), (gradient(exact, leaf),))


# Numbers at the edge ------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    "loss",
    [
        GRPO(kl=0.1),
        GRPO(dual_clip=3.0),
        CISPO(kl=0.1),
        SAPO(),
        GSPO(),
        GSPO(level="token"),
        GMPO(),
        GMPO(clip=math.inf),
        Distillation(clip=0.2),
        Distillation(),
    ],
    ids=str,
)
@pytest.mark.parametrize("old", [-300.0, 0.0])
def test_extreme_ratios_stay_finite_in_float32(loss, old, advantage):
    """exp of 300 overflows float32: no value may be infinite, no gradient inf * 0."""
    other = -300.0 - old
    batch = RolloutBatch(
        [Rollout([1, 2], [0, 1], advantage, [0, old], reference_logprobs=[0, old])]
    )
    logprobs_T = torch.tensor([0.0, other], requires_grad=True)
    value, grad_T = evaluate(loss, batch, logprobs_T)
    assert value.isfinite() and grad_T.isfinite().all()


@pytest.mark.parametrize("difference", [1e-4, -1e-4])
def test_k3_is_exact_near_the_reference_in_float32(difference):
    found = kl_terms(torch.tensor(difference), "k3").double().item()
    assert found == pytest.approx(math.expm1(difference) - difference, rel=2e-3)


# Through the engine -------------------------------------------------------------------------------


def tree(pairs):
    """Two groups whose rollouts share a prompt and, in part, a trained beginning."""
    rng = np.random.default_rng(3)
    rollouts = []
    for group in range(2):
        prompt, turn = rng.integers(1, 61, 6), rng.integers(1, 61, 3)
        for n in range(2 if pairs else 3):
            own = rng.integers(1, 61, 2 + n)
            ids = np.concatenate([prompt, *([turn] if n else []), own])
            mask = np.arange(len(ids)) >= len(prompt)
            old, reference = -rng.exponential(1.0, (2, len(ids)))
            weights = None if pairs else rng.uniform(0.5, 2, len(ids))
            rollouts.append(
                Rollout(ids, mask, n - 0.8, old, reference, weights, group_id=f"g{group}")
            )
    return RolloutBatch(rollouts)


@pytest.mark.parametrize(
    "loss",
    [
        DAPO(kl=0.1, kl_estimator="k2", entropy=0.3),
        DrGRPO(max_tokens=9, entropy=0.3),
        CISPO(kl=0.1),
        SAPO(entropy=0.3),
        GSPO(clip=0.5, clip_high=0.5, kl=0.1, entropy=0.3),
        GSPO(clip=0.5, clip_high=0.5, level="token"),
        GMPO(clip=0.3, kl=0.1, entropy=0.3),
        Distillation(),
        DPO(variant="ipo", length_normalized=True),
        SimPO(),
    ],
    ids=str,
)
@pytest.mark.parametrize("boundary", ["within", "across"])
def test_shared_gradients_are_dense_ones(loss, boundary):
    batch = tree(isinstance(loss, DPO | SimPO))
    model = tiny_model("llama", dtype=torch.float64)
    policy = forkpoint.wrap(model, forkpoint.Config(sharing="tree", boundary=boundary))
    with lifted_upcasts(model):
        dense = dense_run(model, batch, as_loss(loss))
        stats = policy.forward_backward(batch, loss)
    assert stats.computed_tokens < stats.logical_tokens
    assert abs(float(stats.loss) - dense.loss) < 1e-10
    norm = math.sqrt(sum(float(g.square().sum()) for g in dense.gradients.values()))
    assert norm > 1e-3
    for name, parameter in model.named_parameters():
        assert (parameter.grad - dense.gradients[name]).norm() < 1e-10 * norm, name


def test_denominators_scale_each_loss_as_documented():
    batch = make_batch()
    counts = make_denominators(batch)
    logprobs_T = make_logprobs(batch)
    double = dataclasses.replace(counts, rollouts=2 * counts.rollouts)
    for loss in (DrGRPO(max_tokens=4), SAPO(), GSPO(), Distillation(normalize="rollout")):
        value, _ = evaluate(loss, batch, logprobs_T, denominators=counts)
        half, _ = evaluate(loss, batch, logprobs_T, denominators=double)
        assert_equal((value,), (2 * half,))
