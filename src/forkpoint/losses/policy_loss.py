"""Parts that policy-gradient losses share: ratios, weights, KL, entropy, the mean."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.losses.base import (
    Decomposition,
    Loss,
    LossBatch,
    LossOutputs,
    check_choice,
    check_number,
)
from forkpoint.rollouts.batch import RolloutBatch

LARGEST_LOG_RATIO = 20.0
"""Bound of a log-ratio from above, a ratio of 5e8: beyond it, exp would soon be infinite in
float32, and its gradient not a number even where a clip leaves it out."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Loss):
    """A policy gradient: subclasses say what a token is worth in `objective`.

    A trained token's term, with its weight w (the rollouts' `weights`, 1 if they have none), is

        -w * objective + kl * KL - entropy * H

    The weight is that of the policy gradient alone: the KL divergence to the reference policy and
    the entropy H of the policy's distribution at the token stay unweighted, as in TRL and verl. A
    token that is to be left out of everything is left out of the loss mask.

    kl: coefficient of the KL divergence; above 0 it needs reference_logprobs.
    kl_estimator: how it is estimated from the sampled token (J. Schulman, Approximating KL
        Divergence, 2020). With x = reference - logprob, k1 is -x, k2 is x**2 / 2 and k3 is
        exp(x) - x - 1. k1 and k3 are unbiased as values. As a term of a loss it is the gradient
        that counts (arXiv 2506.09477): on-policy, that of k2 is the reverse KL's, that of k3 the
        forward KL's (equal near the reference), and that of k1 is 0 on average. k1 belongs into the
        reward: subtract `kl * (old_logprobs - reference_logprobs)` from the advantages instead.
    entropy: coefficient of the entropy bonus; above 0 the loss has `needs_entropy`.
    normalize: "token" is the sum of the terms over `denominators.tokens`, the trained tokens of the
        whole batch; "rollout" is the mean over `denominators.rollouts` of each rollout's mean over
        its trained tokens, 0 for a rollout without any. Weights do not enter a denominator.

    Without old_logprobs the update is on-policy: `old_logprob = logprob.detach()`, the ratio is 1
    and its gradient that of the log-prob. A log-ratio counts as at most 20 (a ratio of 5e8), so
    that no number overflows.

    Raises ConfigError for arguments that are not allowed.
    """

    decomposition: ClassVar[Decomposition] = "token"
    uses_advantages = True

    kl: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy: float = 0.0
    normalize: Literal["token", "rollout"] = "token"

    def __post_init__(self) -> None:
        check_number("kl", self.kl)
        check_choice("kl_estimator", self.kl_estimator, ("k1", "k2", "k3"))
        check_number("entropy", self.entropy)
        check_choice("normalize", self.normalize, ("token", "rollout"))
        # On the instance, in addition to what its class needs; the dataclass is frozen.
        if self.kl:
            object.__setattr__(self, "needs", (*type(self).needs, "reference_logprobs"))
        if self.entropy:
            object.__setattr__(self, "needs_entropy", True)

    def objective(self, logprobs_T: Tensor, batch: LossBatch) -> Tensor:
        """Quantity that is maximised, for each token: [T], finite outside the loss mask too.

        `logprobs_T` is 0 outside the loss mask.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define objective.")

    def reduce(self, terms_T: Tensor, batch: LossBatch) -> Tensor:
        """The trained tokens' terms as the view's part of the loss."""
        return batch.total(terms_T, self.normalize)

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        logprobs_T = batch.trained(outputs.logprobs)
        terms_T = -self.objective(logprobs_T, batch)
        if batch.weights is not None:
            terms_T = terms_T * batch.trained(batch.weights)
        if self.kl:
            assert batch.reference_logprobs is not None, "check() was not called"
            differences_T = batch.trained(batch.reference_logprobs) - logprobs_T
            terms_T = terms_T + self.kl * kl_terms(differences_T, self.kl_estimator)
        if self.entropy:
            assert outputs.entropies is not None, "the loss has needs_entropy"
            terms_T = terms_T - self.entropy * outputs.entropies
        return self.reduce(terms_T, batch)

    def where_zero(self, batch: RolloutBatch, zero_T: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """For `zero_rollouts`: where a token's objective is 0, or its weight, in all of a rollout.

        None with a KL divergence or an entropy bonus. `zero_T` (bool [T]) says where a token's
        objective is 0 and has a gradient of 0, whatever its log-prob.
        """
        if self.kl or self.entropy:
            return np.zeros(len(batch), bool)
        if batch.weights is not None:
            zero_T = zero_T | (batch.weights == 0)
        return batch.where_all_trained(zero_T)


def log_ratios(logprobs_T: Tensor, batch: LossBatch) -> Tensor:
    """Log-prob minus old log-prob, [T], 0 outside the loss mask; without the old ones on-policy."""
    old_T = logprobs_T.detach() if batch.old_logprobs is None else batch.old_logprobs
    return batch.trained(logprobs_T - old_T)


def ratios(log_ratios: Tensor) -> Tensor:
    """exp, elementwise, of log-ratios of at most LARGEST_LOG_RATIO."""
    return log_ratios.clamp(max=LARGEST_LOG_RATIO).exp()


def kl_terms(differences: Tensor, estimator: str) -> Tensor:
    """Estimates of the KL divergence from reference minus log-prob, elementwise."""
    if estimator == "k1":
        return -differences
    if estimator == "k2":
        return differences.square() / 2
    differences = differences.clamp(max=LARGEST_LOG_RATIO)
    return torch.expm1(differences) - differences


def clipped_surrogate(
    ratios: Tensor,
    advantages: Tensor,
    clip: float,
    clip_high: float | None,
    dual_clip: float | None = None,
) -> Tensor:
    """min(r * A, clamp(r, 1 - clip, 1 + clip_high) * A), elementwise; clip_high None is clip.

    With dual_clip it is at least dual_clip * A where A is negative.
    """
    clipped = ratios.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    surrogate = torch.minimum(ratios * advantages, clipped * advantages)
    if dual_clip is None:
        return surrogate
    bounded = torch.maximum(surrogate, dual_clip * advantages)
    return torch.where(advantages < 0, bounded, surrogate)


def check_clips(clip: float, clip_high: float | None) -> None:
    """Raises ConfigError unless both are numbers of at least 0, or infinite."""
    check_number("clip", clip, infinite=True)
    if clip_high is not None:
        check_number("clip_high", clip_high, infinite=True)
