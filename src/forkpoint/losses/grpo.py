"""GRPO and its token-mean variant: the clipped surrogate of PPO with group advantages."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from forkpoint.losses.base import Loss, LossBatch, LossOutputs, check_choice, check_number


@dataclass(frozen=True, kw_only=True)
class GRPO(Loss):
    """The clipped policy gradient of GRPO, token-additive.

    With `r = exp(logprob - old_logprob)` and advantage A, a trained token's term is

        w * (-min(r * A, clamp(r, 1 - clip, 1 + clip_high) * A) + kl * k3)
        k3 = exp(reference - logprob) - (reference - logprob) - 1

    clip, clip_high: how far the ratio may leave 1 downwards and upwards before its gradient ends;
        clip_high None is clip (PPO, arXiv 1707.06347, eq. 7), larger is DAPO's clip-higher (arXiv
        2503.14476), `math.inf` is no clipping.
    kl: coefficient of the KL divergence to the reference policy by the unbiased estimator k3 (GRPO,
        arXiv 2402.03300, eq. 4). Above 0 it needs reference_logprobs.
    normalize: "token" is the sum of the terms over `denominators.tokens`, the trained tokens of the
        whole batch (DAPO's token-level loss); "rollout" is the mean over `denominators.rollouts` of
        each rollout's mean over its trained tokens (GRPO, eq. 3), 0 for a rollout without any.

    Without old_logprobs the update is on-policy: `old_logprob = logprob.detach()`, the ratio is 1
    and its gradient that of the log-prob. The w are the rollouts' weights, 1 if they have none;
    they multiply the whole term, its KL part included, and do not enter the denominator.

    Raises ConfigError for arguments that are not allowed.
    """

    decomposition = "token"

    clip: float = 0.2
    clip_high: float | None = None
    kl: float = 0.0
    normalize: Literal["token", "rollout"] = "token"
    needs: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number("clip", self.clip, infinite=True)
        if self.clip_high is not None:
            check_number("clip_high", self.clip_high, infinite=True)
        check_number("kl", self.kl)
        check_choice("normalize", self.normalize, ("token", "rollout"))
        object.__setattr__(self, "needs", ("reference_logprobs",) if self.kl else ())

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        logprobs_T = batch.trained(outputs.logprobs)
        advantages_T = batch.trained(batch.advantages)
        terms_T = -clipped_surrogate(
            log_ratios(logprobs_T, batch).exp(), advantages_T, self.clip, self.clip_high
        )
        if self.kl:
            assert batch.reference_logprobs is not None, "check() was not called"
            log_ratios_T = batch.trained(batch.reference_logprobs) - logprobs_T
            terms_T = terms_T + self.kl * (log_ratios_T.exp() - log_ratios_T - 1)
        if batch.weights is not None:
            terms_T = terms_T * batch.trained(batch.weights)
        return batch.total(terms_T, self.normalize)


def log_ratios(logprobs_T: Tensor, batch: LossBatch) -> Tensor:
    """Log-prob minus old log-prob, [T], 0 outside the loss mask; without the old ones on-policy."""
    old_T = logprobs_T.detach() if batch.old_logprobs is None else batch.old_logprobs
    return batch.trained(logprobs_T - old_T)


def clipped_surrogate(
    ratios: Tensor, advantages: Tensor, clip: float, clip_high: float | None
) -> Tensor:
    """min(r * A, clamp(r, 1 - clip, 1 + clip_high) * A), elementwise; clip_high None is clip."""
    clipped = ratios.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    return torch.minimum(ratios * advantages, clipped * advantages)
