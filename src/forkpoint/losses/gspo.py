"""GSPO: the clipped surrogate with one importance ratio per rollout."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.losses.arguments import explains_arguments
from forkpoint.losses.base import Decomposition, LossBatch, check_choice
from forkpoint.losses.policy_loss import (
    PolicyLoss,
    check_clips,
    clipped_surrogate,
    log_ratios,
    ratios,
)
from forkpoint.rollouts.batch import RolloutBatch


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class GSPO(PolicyLoss):
    """Group sequence policy optimization (arXiv 2507.18071, eq. 5 and 7), rollout-additive.

    With the means over the rollout's trained tokens

        s = exp(mean(logprob - old_logprob))        A = mean(advantage)

    the objective of each of its trained tokens is `min(s * A, clamp(s, 1 - clip, 1 + clip_high) *
    A)`, and the loss the mean over `denominators.rollouts` of each rollout's mean over its trained
    tokens, 0 for a rollout without any. The other arguments are described in PolicyLoss; a token's
    weight multiplies its objective, and so the rollout's by the mean of its weights.

    clip, clip_high: as in GRPO, but of a ratio per rollout and hence far smaller; the defaults are
        the paper's (section 5.1). clip_high None is clip.
    level: "sequence" is the above. "token" is GSPO-token (eq. 13 and 14): each token has its own
        advantage, and the ratio `s.detach() * exp(logprob - logprob.detach())`, the rollout's as a
        value with the token's own gradient. Both are the same where a rollout's advantages are.

    Raises ConfigError for arguments that are not allowed.
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
        log_ratios_T = _of_tokens(batch.rollout_mean(log_ratios(logprobs_T, batch)), batch)
        if self.level == "token":
            log_ratios_T = log_ratios_T.detach() + (logprobs_T - logprobs_T.detach())
            advantages_T = batch.trained(batch.advantages)
        else:
            advantages_T = _of_tokens(batch.rollout_mean(batch.advantages), batch)
        return clipped_surrogate(ratios(log_ratios_T), advantages_T, self.clip, self.clip_high)

    def zero_rollouts(self, batch: RolloutBatch) -> NDArray[np.bool_]:
        found = self.where_zero(batch, batch.advantages == 0)
        if self.level == "sequence" and batch.weights is not None:
            # The objective of each token has the advantages of all.
            flat = batch.where_all_trained(batch.advantages == 0)
            found &= flat | batch.where_all_trained(batch.weights == 0)
        return found


def _of_tokens(values_n: Tensor, batch: LossBatch) -> Tensor:
    """For each token, the value of its rollout: [T]."""
    return values_n.index_select(0, batch.token_rollout)
