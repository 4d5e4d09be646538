"""GMPO: the geometric mean of a rollout's clipped importance ratios."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.losses.arguments import explains_arguments
from forkpoint.losses.base import Decomposition, LossBatch
from forkpoint.losses.policy_loss import PolicyLoss, check_clips, log_ratios, ratios
from forkpoint.rollouts.batch import RolloutBatch


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class GMPO(PolicyLoss):
    """Geometric-mean policy optimization (arXiv 2507.20673, algorithm 1), rollout-additive.

    With `d = logprob - old_logprob` of a trained token and means over the rollout's trained tokens

        A = mean(advantage)        s = exp(mean(min(d, clip_high) if A > 0 else max(d, -clip)))

    the objective of each of its trained tokens is `s * A`, and the loss the mean over
    `denominators.rollouts` of each rollout's mean over its trained tokens, 0 for a rollout without
    any. A token beyond its bound has no gradient; the other tokens of its rollout keep theirs. The
    other arguments are described in PolicyLoss; a token's weight multiplies its objective, and so
    the rollout's by the mean of its weights.

    clip, clip_high: bounds of a token's log-ratio, below 0 for negative advantages and above 0 for
        positive ones; ratios then lie above exp(-clip) or below exp(clip_high). At least 0, or
        infinite; the default is the paper's. clip_high None is clip.

    Raises ConfigError for arguments that are not allowed.
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
        advantages_T = advantages_n.index_select(0, batch.token_rollout)
        log_ratios_T = log_ratios(logprobs_T, batch)
        high = self.clip if self.clip_high is None else self.clip_high
        clipped_T = torch.where(
            advantages_T > 0, log_ratios_T.clamp(max=high), log_ratios_T.clamp(min=-self.clip)
        )
        objective_n = ratios(batch.rollout_mean(clipped_T)) * advantages_n
        return objective_n.index_select(0, batch.token_rollout)

    def zero_rollouts(self, batch: RolloutBatch) -> NDArray[np.bool_]:
        found = self.where_zero(batch, batch.advantages == 0)
        if batch.weights is not None:
            # The objective of each token has the advantages of all.
            flat = batch.where_all_trained(batch.advantages == 0)
            found &= flat | batch.where_all_trained(batch.weights == 0)
        return found
