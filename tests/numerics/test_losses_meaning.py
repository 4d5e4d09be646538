"""Promises of the losses beyond their formulas: which are the same, and what they estimate."""

import math

import pytest
import torch
from losses_by_loops import assert_equal, evaluate, make_view

from forkpoint.losses import CISPO, GMPO, GRPO, GSPO, SAPO, Distillation, LossOutputs
from forkpoint.losses.policy_loss import kl_terms
from forkpoint.rollouts.batch import Rollout, RolloutBatch

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
