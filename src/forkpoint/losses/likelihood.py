"""Weighted log-likelihood of tokens (SFT), and distillation from the log-probs of a teacher."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.losses.base import (
    Decomposition,
    Loss,
    LossBatch,
    LossOutputs,
    check_choice,
    given,
)
from forkpoint.losses.policy_loss import check_clips, clipped_surrogate, log_ratios, ratios
from forkpoint.rollouts.batch import RolloutBatch


def without_weight(self: Loss, batch: RolloutBatch) -> NDArray[np.bool_]:
    """`zero_rollouts` of losses whose terms are all multiplied by the weights: bool [N]."""
    if batch.weights is None:
        return np.zeros(len(batch), bool)
    return batch.where_all_trained(batch.weights == 0)


@dataclass(frozen=True, kw_only=True)
class LogLikelihood(Loss):
    """The negative log-likelihood of the trained tokens, token-additive.

    The term of a trained token is `-w * logprob`, with the weight w of the rollouts' `weights`,
    else 1. Advantages and old log-probs are not used. A shared trained token counts once for each
    rollout that trains it, as in ordinary fine-tuning.

    Attributes:
        normalize: "token" (the cross-entropy of ordinary fine-tuning) or "rollout", as in
            PolicyLoss; "none" is the sum.
    """

    decomposition: ClassVar[Decomposition] = "token"

    normalize: Literal["token", "rollout", "none"] = "token"

    def __post_init__(self) -> None:
        check_choice("normalize", self.normalize, ("token", "rollout", "none"))

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        terms_T = -batch.trained(outputs.logprobs)
        if batch.weights is not None:
            terms_T = terms_T * batch.trained(batch.weights)
        return batch.total(terms_T, self.normalize)

    zero_rollouts = without_weight


SFT = LogLikelihood
"""Alias of LogLikelihood: supervised fine-tuning."""


@dataclass(frozen=True, kw_only=True)
class Distillation(Loss):
    """Distillation from a teacher whose log-probs are the reference_logprobs, token-additive.

    The sampled tokens estimate the KL divergence, without the teacher's whole distributions. Value
    and gradient are unbiased if the model that `direction` names sampled the tokens. The term of a
    trained token with weight w (from the rollouts' `weights`, else 1) is

        "reverse"  -w * min(r * A, clamp(r, 1 - clip, 1 + clip_high) * A)
                   r = exp(logprob - old_logprob)        A = (reference - logprob).detach()
        "forward"  w * (reference - logprob)

    Attributes:
        direction: "reverse" is KL(student || teacher) on tokens that the student sampled (on-policy
            distillation): a policy gradient with the log-ratio of teacher to student as advantage.
            "forward" is KL(teacher || student) on tokens that the teacher sampled; its gradient is
            that of LogLikelihood. The divergence is that of each token given the tokens before it.
            The effect of a token on later ones is not counted.
        clip, clip_high: bounds of the ratio, as in GRPO, for "reverse" only. By default there is no
            clipping, so the estimate is unbiased.
        normalize: "token" or "rollout", as in PolicyLoss.

    The loss needs reference_logprobs, and does not use advantages. To add rewards, train a policy
    loss with `reference_logprobs - old_logprobs` added to the advantages. Without old_logprobs the
    update is on-policy, as in PolicyLoss.

    Sources: arXiv 2306.13649 (on-policy distillation) and arXiv 2306.08543 (reverse KL as a policy
    gradient).
    """

    decomposition: ClassVar[Decomposition] = "token"
    needs: tuple[str, ...] = field(init=False, repr=False, default=("reference_logprobs",))

    direction: Literal["reverse", "forward"] = "reverse"
    clip: float = math.inf
    clip_high: float | None = None
    normalize: Literal["token", "rollout"] = "token"

    def __post_init__(self) -> None:
        check_choice("direction", self.direction, ("reverse", "forward"))
        check_clips(self.clip, self.clip_high)
        check_choice("normalize", self.normalize, ("token", "rollout"))
        clips = (self.clip, self.clip_high)
        if self.direction == "forward" and clips != (math.inf, None):
            raise ConfigError(
                f"clip is {self.clip!r} and clip_high {self.clip_high!r}, but the direction "
                "'forward' has no ratio to clip. Leave both out, or take 'reverse'."
            )

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        logprobs_T = batch.trained(outputs.logprobs)
        terms_T = batch.trained(given(batch, "reference_logprobs")) - logprobs_T
        if self.direction == "reverse":
            ratios_T = ratios(log_ratios(logprobs_T, batch))
            terms_T = -clipped_surrogate(ratios_T, terms_T.detach(), self.clip, self.clip_high)
        if batch.weights is not None:
            terms_T = terms_T * batch.trained(batch.weights)
        return batch.total(terms_T, self.normalize)

    zero_rollouts = without_weight
