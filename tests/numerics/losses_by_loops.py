"""Batches and views for tests of losses, and every loss as a loop over rollouts and their tokens.

The loops are written from the formulas: one token, one scalar, no masks and no vectors.
"""

import math

import numpy as np
import torch

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
    Distillation,
    DrGRPO,
    LogLikelihood,
    LossOutputs,
    SimPO,
    ValueLoss,
)
from forkpoint.losses.views import LossViews, batch_denominators
from forkpoint.rollouts.batch import Rollout, RolloutBatch

PER_TOKEN = ("advantages", "old_logprobs", "reference_logprobs", "weights", "returns", "old_values")
PAIRS = (DPO, SimPO)


def make_batch(seed=0, *, pairs=False, without=()):
    """Rollouts of three groups, some without trained tokens; as pairs, three groups of two."""
    rng, rng_of_values = np.random.default_rng(seed), np.random.default_rng(seed + 50)
    rollouts = []
    for n in range(6 if pairs else 8):
        length = int(rng.integers(2, 9))
        mask = rng.random(length) < 0.6
        mask[0] = False
        if pairs:
            mask[1] = True
        elif n in (2, 7):
            mask[:] = False
        old, reference = -rng.exponential(1.0, (2, length))
        fields = {
            "old_logprobs": old,
            "reference_logprobs": reference,
            "weights": rng.random(length) + 0.5,
            "returns": rng_of_values.normal(-1, 1, length),
            "old_values": old + rng_of_values.normal(0, 0.2, length),
        }
        rollouts.append(
            Rollout(
                rng.integers(0, 50, length),
                mask,
                float(rng.normal()) if pairs or n % 2 else rng.normal(size=length),
                group_id=f"g{n % 3}",
                rollout_id=f"r{n}",
                **{name: value for name, value in fields.items() if name not in without},
            )
        )
    return RolloutBatch(rollouts)


def make_logprobs(batch):
    """Log-probs near the old ones, so that some ratios are clipped and some are not.

    They stand for a critic's values too, which are then clipped where they leave the old values.
    """
    rng = np.random.default_rng(100)
    old = batch.old_logprobs
    values = -rng.exponential(1.0, len(batch.token_ids)) if old is None else old
    values = values + rng.normal(0, 0.3, len(values))
    return torch.tensor(np.where(batch.loss_mask, values, 0.0), requires_grad=True)


def entropies_of(logprobs):
    """Something to stand for entropies, with a gradient that reaches the same leaf."""
    return logprobs.square() + 0.3 * logprobs


def owners(batch):
    return np.repeat(np.arange(len(batch)), batch.lengths)


def make_view(batch, tokens=None, *, dtype=torch.float64, device="cpu", denominators=None):
    """The view of the given flat token positions (ascending), and those positions."""
    tokens = np.arange(len(batch.token_ids)) if tokens is None else np.asarray(tokens, np.int64)
    counts = denominators or batch_denominators(batch)
    view = LossViews(batch, counts, torch.device(device), dtype).of_tokens(tokens)
    return view, torch.tensor(tokens, device=device)


def outputs_for(loss, logprobs_T):
    """Outputs that the engine would show: values to a critic's loss, entropies if asked for."""
    if loss.reads == "values":
        return LossOutputs(values=logprobs_T)
    entropies_T = entropies_of(logprobs_T) if loss.needs_entropy else None
    return LossOutputs(logprobs=logprobs_T, entropies=entropies_T)


def evaluate(loss, batch, logprobs_T, splits=(None,), denominators=None):
    """The loss and its gradient, summed over views of the given tokens."""
    total = torch.zeros((), dtype=logprobs_T.dtype)
    for tokens in splits:
        view, indices = make_view(batch, tokens, dtype=logprobs_T.dtype, denominators=denominators)
        part = loss(outputs_for(loss, logprobs_T[indices]), view)
        assert part.shape == () and part.dtype == logprobs_T.dtype
        total = total + part
    (grad_T,) = torch.autograd.grad(total, logprobs_T)
    return total.detach(), grad_T


def each_rollout(batch):
    """(rollout, its trained flat positions) for every rollout."""
    for n in range(len(batch.rollout_ids)):
        tokens = range(batch.offsets[n], batch.offsets[n + 1])
        yield n, [t for t in tokens if batch.loss_mask[t]]


def batch_for(loss, *, without=()):
    refused = () if loss.takes_weights else ("weights",)
    batch = make_batch(0, pairs=isinstance(loss, PAIRS), without=(*refused, *without))
    loss.check(batch)
    return batch


# The losses, token by token -----------------------------------------------------------------------


def old_logprob(batch, logprob, t):
    return logprob.detach() if batch.old_logprobs is None else batch.old_logprobs[t]


def clipped(ratio, advantage, low, high):
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def clips(loss):
    return loss.clip, loss.clip if loss.clip_high is None else loss.clip_high


def ppo_objective(loss, batch, logprobs_T, t, tokens):
    logprob, advantage = logprobs_T[t], batch.advantages[t]
    worth = clipped((logprob - old_logprob(batch, logprob, t)).exp(), advantage, *clips(loss))
    if loss.dual_clip is not None and advantage < 0 and worth < loss.dual_clip * advantage:
        return torch.tensor(loss.dual_clip * advantage)
    return worth


def cispo_objective(loss, batch, logprobs_T, t, tokens):
    logprob = logprobs_T[t]
    ratio = (logprob.detach() - old_logprob(batch, logprob, t)).exp()
    low, high = clips(loss)
    return min(max(ratio, 1 - low), 1 + high) * batch.advantages[t] * logprob


def sapo_objective(loss, batch, logprobs_T, t, tokens):
    logprob, advantage = logprobs_T[t], batch.advantages[t]
    tau = loss.tau_pos if advantage > 0 else loss.tau_neg
    ratio = (logprob - old_logprob(batch, logprob, t)).exp()
    return 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage


def gspo_objective(loss, batch, logprobs_T, t, tokens):
    differences = [logprobs_T[u] - old_logprob(batch, logprobs_T[u], u) for u in tokens]
    ratio = (sum(differences) / len(tokens)).exp()
    advantage = sum(batch.advantages[u] for u in tokens) / len(tokens)
    if loss.level == "token":
        ratio = ratio.detach() * logprobs_T[t].exp() / logprobs_T[t].detach().exp()
        advantage = batch.advantages[t]
    return clipped(ratio, advantage, *clips(loss))


def gmpo_objective(loss, batch, logprobs_T, t, tokens):
    advantage = sum(batch.advantages[u] for u in tokens) / len(tokens)
    low, high = clips(loss)
    product = 1
    for u in tokens:
        ratio = (logprobs_T[u] - old_logprob(batch, logprobs_T[u], u)).exp()
        product *= min(ratio, math.exp(high)) if advantage > 0 else max(ratio, math.exp(-low))
    return product ** (1 / len(tokens)) * advantage


def divisor(loss, batch, tokens):
    """Divisor of the terms of a rollout with these trained tokens."""
    rollouts = len(batch.rollout_ids)
    if isinstance(loss, DrGRPO):
        return rollouts * loss.max_tokens
    of_rollout = max(len(tokens), 1) * rollouts
    return {"token": batch.loss_mask.sum(), "rollout": of_rollout, "none": 1}[loss.normalize]


def policy_by_loops(objective):
    """A policy loss, of what one trained token is worth."""

    def by_loops(loss, batch, logprobs_T):
        total = torch.zeros((), dtype=torch.float64)
        for _, tokens in each_rollout(batch):
            own = torch.zeros((), dtype=torch.float64)
            for t in tokens:
                weight = 1 if batch.weights is None else batch.weights[t]
                own = own - weight * objective(loss, batch, logprobs_T, t, tokens)
                if loss.kl:
                    x = batch.reference_logprobs[t] - logprobs_T[t]
                    estimates = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - x - 1}
                    own = own + loss.kl * estimates[loss.kl_estimator]
                if loss.entropy:
                    own = own - loss.entropy * entropies_of(logprobs_T[t])
            total = total + own / divisor(loss, batch, tokens)
        return total

    return by_loops


def likelihood_by_loops(loss, batch, logprobs_T):
    total = torch.zeros((), dtype=torch.float64)
    for _, tokens in each_rollout(batch):
        for t in tokens:
            weight = 1 if batch.weights is None else batch.weights[t]
            total = total - weight * logprobs_T[t] / divisor(loss, batch, tokens)
    return total


def distillation_by_loops(loss, batch, logprobs_T):
    total = torch.zeros((), dtype=torch.float64)
    for _, tokens in each_rollout(batch):
        for t in tokens:
            logprob = logprobs_T[t]
            term = batch.reference_logprobs[t] - logprob
            if loss.direction == "reverse":
                ratio = (logprob - old_logprob(batch, logprob, t)).exp()
                term = -clipped(ratio, term.detach(), *clips(loss))
            weight = 1 if batch.weights is None else batch.weights[t]
            total = total + weight * term / divisor(loss, batch, tokens)
    return total


def pairs(batch):
    """(trained positions of the chosen, of the rejected rollout) of each group."""
    members = list(each_rollout(batch))
    for one, chosen in members:
        for other, rejected in members:
            same_group = batch.group_index[one] == batch.group_index[other]
            if same_group and batch.advantages[chosen[0]] > batch.advantages[rejected[0]]:
                yield chosen, rejected


def minus_log_sigmoid(x):
    return torch.log1p(torch.exp(-x))


def dpo_by_loops(loss, batch, logprobs_T):
    total = torch.zeros((), dtype=torch.float64)
    for both in pairs(batch):
        chosen, rejected = (
            sum(logprobs_T[t] - batch.reference_logprobs[t] for t in tokens)
            / (len(tokens) if loss.length_normalized else 1)
            for tokens in both
        )
        margin, e = chosen - rejected, loss.label_smoothing
        right = minus_log_sigmoid(loss.beta * margin)
        wrong = minus_log_sigmoid(-loss.beta * margin)
        total = (
            total
            + {
                "sigmoid": (1 - e) * right + e * wrong,
                "robust": ((1 - e) * right - e * wrong) / (1 - 2 * e),
                "hinge": max(0 * margin, 1 - loss.beta * margin),
                "ipo": (margin - 1 / (2 * loss.beta)) ** 2,
            }[loss.variant]
        )
    return total / len(set(batch.group_index.tolist()))


def simpo_by_loops(loss, batch, logprobs_T):
    total = torch.zeros((), dtype=torch.float64)
    for both in pairs(batch):
        chosen, rejected = (sum(logprobs_T[t] for t in tokens) / len(tokens) for tokens in both)
        total = total + minus_log_sigmoid(loss.beta * (chosen - rejected) - loss.gamma)
    return total / len(set(batch.group_index.tolist()))


def value_by_loops(loss, batch, values_T):
    total = torch.zeros((), dtype=torch.float64)
    for _, tokens in each_rollout(batch):
        for t in tokens:
            value, target = values_T[t], batch.returns[t]
            error = (value - target) ** 2
            if loss.clip < math.inf:
                old = batch.old_values[t]
                near = min(max(value, old - loss.clip), old + loss.clip)
                error = max(error, (near - target) ** 2)
            total = total + error / 2 / divisor(loss, batch, tokens)
    return total


ppo = policy_by_loops(ppo_objective)
cispo = policy_by_loops(cispo_objective)
sapo = policy_by_loops(sapo_objective)
gspo = policy_by_loops(gspo_objective)
gmpo = policy_by_loops(gmpo_objective)
CASES = [
    (GRPO(), ppo),
    (GRPO(clip=0.1, clip_high=0.4, kl=0.3), ppo),
    (GRPO(clip=math.inf, kl=0.05, normalize="rollout"), ppo),
    (GRPO(kl=0.2, kl_estimator="k1"), ppo),
    (GRPO(kl=0.2, kl_estimator="k2", entropy=0.1, normalize="rollout"), ppo),
    (GRPO(clip=math.inf, dual_clip=1.1), ppo),
    (PPO(clip=0.1, entropy=0.02, dual_clip=1.2), ppo),
    (DAPO(kl=0.1, entropy=0.3), ppo),
    (BNPO(kl=0.1), ppo),
    (DrGRPO(max_tokens=5, clip=0.1, kl=0.1, entropy=0.1), ppo),
    (CISPO(), cispo),
    (CISPO(clip=0.1, clip_high=0.2, normalize="rollout"), cispo),
    (CISPO(clip=0.15, clip_high=None, kl=0.1, entropy=0.2), cispo),
    (SAPO(), sapo),
    (SAPO(tau_pos=0.5, tau_neg=2.0, normalize="token", kl=0.1, entropy=0.2), sapo),
    (GSPO(), gspo),
    (GSPO(clip=0.05, clip_high=0.2, kl=0.1, entropy=0.1), gspo),
    (GSPO(clip=0.1, clip_high=0.2, level="token"), gspo),
    (GMPO(clip=0.1, clip_high=0.2, kl=0.1, entropy=0.1), gmpo),
    (GMPO(clip=math.inf), gmpo),
    *((LogLikelihood(normalize=n), likelihood_by_loops) for n in ("token", "rollout", "none")),
    (Distillation(), distillation_by_loops),
    (Distillation(clip=0.1, clip_high=0.2, normalize="rollout"), distillation_by_loops),
    (Distillation(direction="forward"), distillation_by_loops),
    (DPO(), dpo_by_loops),
    (DPO(beta=0.7, label_smoothing=0.2), dpo_by_loops),
    (DPO(beta=0.7, label_smoothing=0.2, variant="robust", length_normalized=True), dpo_by_loops),
    (DPO(beta=1.1, variant="hinge"), dpo_by_loops),
    (DPO(beta=0.3, variant="ipo"), dpo_by_loops),
    (DPO(beta=0.3, variant="ipo", length_normalized=True), dpo_by_loops),
    (SimPO(), simpo_by_loops),
    (SimPO(beta=0.8, gamma=0.0), simpo_by_loops),
    (ValueLoss(), value_by_loops),
    (ValueLoss(clip=0.1, normalize="rollout"), value_by_loops),
    (ValueLoss(clip=math.inf), value_by_loops),
]
LOSSES = [case for case, _ in CASES]


def assert_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
