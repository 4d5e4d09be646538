"""PPO's clipped surrogate per token, and the losses that differ from it by their means."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.losses.arguments import explains_arguments
from forkpoint.losses.base import LossBatch, check_number, divide
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
class GRPO(PolicyLoss):
    """The clipped policy gradient of GRPO (arXiv 2402.03300, eq. 3), token-additive.

    With `r = exp(logprob - old_logprob)` and advantage A, a trained token's objective is

        min(r * A, clamp(r, 1 - clip, 1 + clip_high) * A)

    and its term `-w * objective + kl * KL - entropy * H`, as in PolicyLoss, where the other
    arguments are described. The sum of the terms is divided by `denominators.tokens`;
    `normalize="rollout"` is the mean of GRPO as first published.

    clip, clip_high: how far the ratio may leave 1 downwards and upwards before its gradient ends;
        clip_high None is clip (PPO, arXiv 1707.06347, eq. 7), larger is DAPO's clip-higher,
        `math.inf` is no clipping.
    dual_clip: None, or above 1: where A is negative the objective is at least dual_clip * A, so
        that its gradient ends at that ratio too (dual-clip PPO, arXiv 1912.09729, eq. 5;
        verl's clip_ratio_c, TRL's delta).

    Raises ConfigError for arguments that are not allowed.
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
        return self.where_zero(batch, batch.advantages == 0)


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class PPO(GRPO):
    """The policy loss of PPO (arXiv 1707.06347, eq. 7), token-additive: GRPO's under its own name.

    It wants one advantage per token, such as generalized advantage estimates over a critic's values
    (`losses.gae`): give every Rollout its `advantage` as an array. The critic is a model of its
    own, trained by `losses.ValueLoss`. The sum of the terms is divided by `denominators.tokens`,
    unless normalize is "rollout".
    """


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """DAPO's loss (arXiv 2503.14476, eq. 8): the token mean and clip-higher, token-additive.

    It is GRPO(clip=0.2, clip_high=0.28): the sum over all trained tokens of the batch over
    `denominators.tokens`. DAPO's dynamic sampling and its penalty for overlong responses are
    matters of the rollouts and their advantages.
    """

    clip_high: float | None = 0.28
    normalize: Literal["token", "rollout"] = field(init=False, repr=False, default="token")


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class BNPO(GRPO):
    """TRL's loss type "bnpo", token-additive: the terms over the trained tokens of the batch.

    TRL divides by the tokens of the batch that is at hand on one device, so that the loss depends
    on how a step is cut. Here the batch at hand is what `denominators.tokens` counts. Counted over
    the whole step, as by default, that is the token mean of GRPO and DAPO. To cut a step as TRL
    does, give each call the counts of its own batch and 1 / (number of calls) as `scale`. The
    normalisation of rewards in the paper of that name (arXiv 2506.02864) is one of advantages.
    """

    normalize: Literal["token", "rollout"] = field(init=False, repr=False, default="token")


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """Dr. GRPO (arXiv 2503.20783): one constant in place of lengths, token-additive.

    The sum of the terms over `denominators.rollouts * max_tokens`: a token weighs the same in a
    short response and in a long one, in a batch of short ones and of long ones. Its advantages are
    rewards less the group's mean, not divided by their standard deviation.

    max_tokens: the most tokens that a response may have; any constant does, it scales the loss.
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
        return self.where_zero(batch, batch.advantages == 0)
