"""CISPO: the importance ratio as a clipped weight without a gradient of its own."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.losses.arguments import explains_arguments
from forkpoint.losses.base import LossBatch
from forkpoint.losses.policy_loss import PolicyLoss, check_clips, log_ratios, ratios
from forkpoint.rollouts.batch import RolloutBatch


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyLoss):
    """Clipped importance-sampling-weight policy optimization (MiniMax-M1, arXiv 2506.13585, eq. 4
    and 5), token-additive.

    With `r = exp(logprob - old_logprob)` and advantage A, a trained token's objective is

        clamp(r, 1 - clip, 1 + clip_high).detach() * A * logprob

    so that no token loses its gradient, however far it is off-policy. The sum of the terms is
    divided by `denominators.tokens`, unless normalize is "rollout". The other arguments are
    described in PolicyLoss.

    clip, clip_high: how far the weight may leave 1 downwards and upwards; `math.inf` is no bound,
        and clip_high None is clip. The paper leaves the lower side unbounded and names no number
        for the upper one; the default bounds weights by 5. TRL's epsilon_high is 1 + clip_high.

    Raises ConfigError for arguments that are not allowed.
    """

    clip: float = math.inf
    clip_high: float | None = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clips(self.clip, self.clip_high)

    def objective(self, logprobs_T: Tensor, batch: LossBatch) -> Tensor:
        weights_T = ratios(log_ratios(logprobs_T, batch).detach())
        high = self.clip if self.clip_high is None else self.clip_high
        weights_T = weights_T.clamp(1 - self.clip, 1 + high)
        return weights_T * batch.trained(batch.advantages) * logprobs_T

    def zero_rollouts(self, batch: RolloutBatch) -> NDArray[np.bool_]:
        return self.where_zero(batch, batch.advantages == 0)
