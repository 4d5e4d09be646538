"""Policy gradients: PPO's clipped surrogate and its variants, CISPO, SAPO, GSPO and GMPO."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.losses.base import (
    Decomposition,
    Loss,
    LossBatch,
    LossOutputs,
    check_choice,
    check_number,
    divide,
    given,
    given_entropies,
)
from forkpoint.rollouts.batch import RolloutBatch

LARGEST_LOG_RATIO = 20.0
"""Upper bound of a log-ratio, a ratio of 5e8. Above it exp would overflow in float32, and gradients
would be NaN even for clipped tokens."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Loss):
    """Base class of policy gradients. A subclass defines `objective`.

    The term of a trained token with weight w (from the rollouts' `weights`, else 1) is

        -w * objective + kl * KL - entropy * H

    Only the policy gradient is weighted, as in TRL and verl. The KL divergence to the reference
    policy and the entropy H at the token are not. To leave a token out of all terms, leave it out
    of the loss mask.

    Attributes:
        kl: coefficient of the KL divergence. Above 0 the loss needs reference_logprobs.
        kl_estimator: estimator of the KL divergence from the sampled token (J. Schulman,
            Approximating KL Divergence, 2020). With x = reference - logprob, k1 is -x, k2 is x**2 /
            2 and k3 is exp(x) - x - 1. The values of k1 and k3 are unbiased. On-policy, the
            gradient of k2 is that of the reverse KL, that of k3 is that of the forward KL (equal
            near the reference), and that of k1 is 0 on average (arXiv 2506.09477). Use k1 in the
            reward instead: subtract `kl * (old_logprobs - reference_logprobs)` from the advantages.
        entropy: coefficient of the entropy bonus. Above 0 the loss has `needs_entropy`.
        normalize: "token" divides the sum of the terms by `denominators.tokens`, the trained tokens
            of the whole batch. "rollout" takes the mean over the trained tokens of each rollout (0
            without any), sums it over rollouts and divides by `denominators.rollouts`. Denominators
            do not depend on weights.

    Without old_logprobs the update is on-policy: `old_logprob = logprob.detach()`, the ratio is 1,
    and its gradient is that of the log-prob. Log-ratios are bounded by 20 (a ratio of 5e8), so that
    no number overflows.
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
        # Set on the instance, in addition to the needs of its class. The dataclass is frozen.
        if self.kl:
            object.__setattr__(self, "needs", (*type(self).needs, "reference_logprobs"))
        if self.entropy:
            object.__setattr__(self, "needs_entropy", True)

    def objective(self, logprobs_T: Tensor, batch: LossBatch) -> Tensor:
        """Quantity to maximise for each token: [T]. It must be finite outside the loss mask too.

        `logprobs_T` is 0 outside the loss mask.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define objective.")

    def clipped(self, logprobs_T: Tensor, batch: LossBatch) -> Tensor:
        """Tokens with an advantage but without a gradient of the objective: bool [T], for metrics.

        The batch is a view of whole rollouts.
        """
        with torch.enable_grad():
            leaf_T = batch.trained(logprobs_T.detach()).requires_grad_()
            total = self.objective(leaf_T, batch).sum()
        if not total.requires_grad:  # an objective that does not read log-probs
            return torch.zeros_like(batch.loss_mask)
        (gradient_T,) = torch.autograd.grad(total, leaf_T)
        return batch.loss_mask & (batch.advantages != 0) & (gradient_T == 0)

    def reduce(self, terms_T: Tensor, batch: LossBatch) -> Tensor:
        """Combine the terms of trained tokens into the view's part of the loss."""
        return batch.total(terms_T, self.normalize)

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        logprobs_T = batch.trained(outputs.logprobs)
        terms_T = -self.objective(logprobs_T, batch)
        if batch.weights is not None:
            terms_T = terms_T * batch.trained(batch.weights)
        if self.kl:
            differences_T = batch.trained(given(batch, "reference_logprobs")) - logprobs_T
            terms_T = terms_T + self.kl * kl_terms(differences_T, self.kl_estimator)
        if self.entropy:
            terms_T = terms_T - self.entropy * given_entropies(outputs)
        return self.reduce(terms_T, batch)

    def zero_without_advantage(
        self, batch: RolloutBatch, *, of_rollout: bool = False
    ) -> NDArray[np.bool_]:
        """`zero_rollouts` of losses whose objective is 0 where the advantage is 0: bool [N].

        `of_rollout`: whether a token's objective has the advantages of its whole rollout.
        """
        if self.kl or self.entropy:
            return np.zeros(len(batch), bool)
        no_advantage_T = batch.advantages == 0
        if batch.weights is None:
            return batch.where_all_trained(no_advantage_T)
        no_weight_T = batch.weights == 0
        if not of_rollout:
            return batch.where_all_trained(no_advantage_T | no_weight_T)
        found = batch.where_all_trained(no_advantage_T)
        return found | batch.where_all_trained(no_weight_T)


def log_ratios(logprobs_T: Tensor, batch: LossBatch) -> Tensor:
    """Log-prob minus old log-prob: [T], 0 outside the loss mask.

    Without old log-probs it is 0, with the gradient of the log-prob.
    """
    old_T = logprobs_T.detach() if batch.old_logprobs is None else batch.old_logprobs
    return batch.trained(logprobs_T - old_T)


def ratios(log_ratios: Tensor) -> Tensor:
    """Elementwise exp of log-ratios, which are clamped to LARGEST_LOG_RATIO."""
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
    clipped = ratios.clamp(1 - clip, 1 + upper(clip, clip_high))
    surrogate = torch.minimum(ratios * advantages, clipped * advantages)
    if dual_clip is None:
        return surrogate
    bounded = torch.maximum(surrogate, dual_clip * advantages)
    return torch.where(advantages < 0, bounded, surrogate)


def upper(clip: float, clip_high: float | None) -> float:
    return clip if clip_high is None else clip_high


def check_clips(clip: float, clip_high: float | None) -> None:
    """Raises ConfigError unless both are numbers of at least 0, or infinite."""
    check_number("clip", clip, infinite=True)
    if clip_high is not None:
        check_number("clip_high", clip_high, infinite=True)


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyLoss):
    """The clipped policy gradient of GRPO (arXiv 2402.03300, eq. 3), token-additive.

    With `r = exp(logprob - old_logprob)` and advantage A, the objective of a trained token is

        min(r * A, clamp(r, 1 - clip, 1 + clip_high) * A)

    and its term is `-w * objective + kl * KL - entropy * H`. PolicyLoss describes the other
    arguments. The sum of the terms is divided by `denominators.tokens`. The first publication of
    GRPO has `normalize="rollout"`.

    Attributes:
        clip, clip_high: largest distance of the ratio below and above 1 with a gradient. clip_high
            None means clip (PPO, arXiv 1707.06347, eq. 7). A larger clip_high is DAPO's
            clip-higher. `math.inf` means no clipping.
        dual_clip: None, or a number above 1. For negative A the objective is at least
            dual_clip * A, so the gradient ends at that ratio too (dual-clip PPO, arXiv 1912.09729,
            eq. 5; clip_ratio_c in verl, delta in TRL).
    """

    clip: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clips(self.clip, self.clip_high)
        if self.dual_clip is not None:
            check_number("dual_clip", self.dual_clip, positive=True)
            if self.dual_clip <= 1:
                raise ConfigError(
                    f"dual_clip is {self.dual_clip!r}; it takes a number above 1, such as 3, or "
                    "None. At 1 no token of a negative advantage would be trained on-policy."
                )

    def objective(self, logprobs_T: Tensor, batch: LossBatch) -> Tensor:
        return clipped_surrogate(
            ratios(log_ratios(logprobs_T, batch)),
            batch.trained(batch.advantages),
            self.clip,
            self.clip_high,
            self.dual_clip,
        )

    def zero_rollouts(self, batch: RolloutBatch) -> NDArray[np.bool_]:
        return self.zero_without_advantage(batch)


@dataclass(frozen=True, kw_only=True)
class PPO(GRPO):
    """The policy loss of PPO (arXiv 1707.06347, eq. 7), token-additive. It equals GRPO.

    Give every Rollout an array of advantages, one per token, such as generalized advantage
    estimates over the values of a critic (docs/reference/losses.md). The critic is a separate
    model, trained with `losses.ValueLoss`. The sum of the terms is divided by
    `denominators.tokens`, unless normalize is "rollout".
    """


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """DAPO's loss (arXiv 2503.14476, eq. 8): the token mean and clip-higher, token-additive.

    It equals GRPO(clip=0.2, clip_high=0.28): the sum over all trained tokens of the batch, divided
    by `denominators.tokens`. Dynamic sampling and the penalty for overlong responses of DAPO are
    not part of the loss: apply them to rollouts and advantages.
    """

    clip_high: float | None = 0.28
    normalize: Literal["token", "rollout"] = field(init=False, repr=False, default="token")


@dataclass(frozen=True, kw_only=True)
class BNPO(GRPO):
    """TRL's loss type "bnpo", token-additive: the sum of the terms over `denominators.tokens`.

    TRL divides by the tokens of a micro-batch on one device, so its loss depends on the size of
    micro-batches. By default `denominators.tokens` counts the whole step, and the loss is the token
    mean of GRPO and DAPO. To reproduce TRL, make one call for each micro-batch, with its own counts
    and with 1 / (number of calls) as `scale`. The normalisation of rewards in the paper of that
    name (arXiv 2506.02864) belongs to the advantages.
    """

    normalize: Literal["token", "rollout"] = field(init=False, repr=False, default="token")


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """Dr. GRPO (arXiv 2503.20783), token-additive: it divides by a constant instead of lengths.

    The sum of the terms is divided by `denominators.rollouts * max_tokens`. A token has the same
    weight in short and long responses. Compute advantages as rewards minus the mean of the group,
    without dividing by the standard deviation.

    Attributes:
        max_tokens: largest length of a response. It only scales the loss.
    """

    max_tokens: int
    normalize: Literal["token", "rollout"] = field(init=False, repr=False, default="rollout")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("max_tokens", self.max_tokens, positive=True)

    def reduce(self, terms_T: Tensor, batch: LossBatch) -> Tensor:
        total = batch.trained(terms_T).sum()
        return divide(total, batch.denominators.rollouts * self.max_tokens)

    def zero_rollouts(self, batch: RolloutBatch) -> NDArray[np.bool_]:
        return self.zero_without_advantage(batch)


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyLoss):
    """Clipped importance-sampling-weight policy optimization (MiniMax-M1, arXiv 2506.13585, eq. 4
    and 5), token-additive.

    With `r = exp(logprob - old_logprob)` and advantage A, the objective of a trained token is

        clamp(r, 1 - clip, 1 + clip_high).detach() * A * logprob

    Each token keeps its gradient, even far off-policy. The sum of the terms is divided by
    `denominators.tokens`, unless normalize is "rollout". PolicyLoss describes the other arguments.

    Attributes:
        clip, clip_high: largest distance of the weight below and above 1. `math.inf` means no
            bound, and clip_high None means clip. The paper has no lower bound, and gives no number
            for the upper one. The default bounds weights by 5. TRL's epsilon_high is 1 + clip_high.
    """

    clip: float = math.inf
    clip_high: float | None = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clips(self.clip, self.clip_high)

    def objective(self, logprobs_T: Tensor, batch: LossBatch) -> Tensor:
        weights_T = ratios(log_ratios(logprobs_T, batch).detach())
        weights_T = weights_T.clamp(1 - self.clip, 1 + upper(self.clip, self.clip_high))
        return weights_T * batch.trained(batch.advantages) * logprobs_T

    def clipped(self, logprobs_T: Tensor, batch: LossBatch) -> Tensor:
        """Tokens whose weight is clipped: bool [T]. They keep their gradient."""
        weights_T = ratios(log_ratios(logprobs_T, batch))
        low, high = 1 - self.clip, 1 + upper(self.clip, self.clip_high)
        return batch.loss_mask & ((weights_T < low) | (weights_T > high))

    def zero_rollouts(self, batch: RolloutBatch) -> NDArray[np.bool_]:
        return self.zero_without_advantage(batch)


@dataclass(frozen=True, kw_only=True)
class SAPO(PolicyLoss):
    """Soft adaptive policy optimization (arXiv 2511.20347, eq. 5), token-additive.

    With `r = exp(logprob - old_logprob)` and advantage A, the objective of a trained token is

        4 / tau * sigmoid(tau * (r - 1)) * A        tau = tau_pos if A > 0 else tau_neg

    At r = 1 its gradient is the policy gradient. It decreases with the distance of r from 1. The
    loss is the mean over `denominators.rollouts` of each rollout's mean over its trained tokens,
    unless normalize is "token". PolicyLoss describes the other arguments.

    Attributes:
        tau_pos, tau_neg: rate of the decrease, for positive advantages and for all others; above 0.
            The defaults are those of the paper.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    normalize: Literal["token", "rollout"] = "rollout"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("tau_pos", self.tau_pos, positive=True)
        check_number("tau_neg", self.tau_neg, positive=True)

    def objective(self, logprobs_T: Tensor, batch: LossBatch) -> Tensor:
        advantages_T = batch.trained(batch.advantages)
        tau_T = torch.full_like(advantages_T, self.tau_neg)
        tau_T = tau_T.masked_fill(advantages_T > 0, self.tau_pos)
        ratios_T = ratios(log_ratios(logprobs_T, batch))
        return 4 / tau_T * torch.sigmoid(tau_T * (ratios_T - 1)) * advantages_T

    def zero_rollouts(self, batch: RolloutBatch) -> NDArray[np.bool_]:
        return self.zero_without_advantage(batch)


@dataclass(frozen=True, kw_only=True)
class GSPO(PolicyLoss):
    """Group sequence policy optimization (arXiv 2507.18071, eq. 5 and 7), rollout-additive.

    With the means over the rollout's trained tokens

        s = exp(mean(logprob - old_logprob))        A = mean(advantage)

    the objective of each of its trained tokens is `min(s * A, clamp(s, 1 - clip, 1 + clip_high) *
    A)`. The loss is the mean over `denominators.rollouts` of each rollout's mean over its trained
    tokens, 0 for a rollout without any. PolicyLoss describes the other arguments. A weight
    multiplies the objective of its token.

    Attributes:
        clip, clip_high: as in GRPO, for the ratio of a rollout, which needs far smaller values. The
            defaults are those of the paper (section 5.1). clip_high None means clip.
        level: "sequence" is the formula above. "token" is GSPO-token (eq. 13 and 14): each token
            has its own advantage and the ratio `s.detach() * exp(logprob - logprob.detach())`. Both
            levels are equal if all tokens of a rollout have the same advantage.
    """

    decomposition: ClassVar[Decomposition] = "rollout"

    clip: float = 3e-4
    clip_high: float | None = 4e-4
    level: Literal["sequence", "token"] = "sequence"
    normalize: Literal["token", "rollout"] = field(init=False, repr=False, default="rollout")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clips(self.clip, self.clip_high)
        check_choice("level", self.level, ("sequence", "token"))

    def objective(self, logprobs_T: Tensor, batch: LossBatch) -> Tensor:
        log_ratios_T = batch.to_tokens(batch.rollout_mean(log_ratios(logprobs_T, batch)))
        if self.level == "token":
            log_ratios_T = log_ratios_T.detach() + (logprobs_T - logprobs_T.detach())
            advantages_T = batch.trained(batch.advantages)
        else:
            advantages_T = batch.to_tokens(batch.rollout_mean(batch.advantages))
        return clipped_surrogate(ratios(log_ratios_T), advantages_T, self.clip, self.clip_high)

    def zero_rollouts(self, batch: RolloutBatch) -> NDArray[np.bool_]:
        return self.zero_without_advantage(batch, of_rollout=self.level == "sequence")


@dataclass(frozen=True, kw_only=True)
class GMPO(PolicyLoss):
    """Geometric-mean policy optimization (arXiv 2507.20673, algorithm 1), rollout-additive.

    With `d = logprob - old_logprob` of a trained token and means over the rollout's trained tokens

        A = mean(advantage)        s = exp(mean(min(d, clip_high) if A > 0 else max(d, -clip)))

    the objective of each of its trained tokens is `s * A`. The loss is the mean over
    `denominators.rollouts` of each rollout's mean over its trained tokens, 0 for a rollout without
    any. A token beyond its bound has no gradient, and the other tokens of its rollout keep theirs.
    PolicyLoss describes the other arguments. A weight multiplies the objective of its token.

    Attributes:
        clip, clip_high: bounds of the log-ratio of a token: -clip from below for negative
            advantages, clip_high from above for positive ones. Ratios are then above exp(-clip) or
            below exp(clip_high). Both are at least 0 or infinite. The default is that of the
            paper. clip_high None means clip.
    """

    decomposition: ClassVar[Decomposition] = "rollout"

    clip: float = 0.4
    clip_high: float | None = None
    normalize: Literal["token", "rollout"] = field(init=False, repr=False, default="rollout")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clips(self.clip, self.clip_high)

    def objective(self, logprobs_T: Tensor, batch: LossBatch) -> Tensor:
        advantages_n = batch.rollout_mean(batch.advantages)
        log_ratios_T = log_ratios(logprobs_T, batch)
        clipped_T = torch.where(
            batch.to_tokens(advantages_n) > 0,
            log_ratios_T.clamp(max=upper(self.clip, self.clip_high)),
            log_ratios_T.clamp(min=-self.clip),
        )
        return batch.to_tokens(ratios(batch.rollout_mean(clipped_T)) * advantages_n)

    def zero_rollouts(self, batch: RolloutBatch) -> NDArray[np.bool_]:
        return self.zero_without_advantage(batch, of_rollout=True)
