"""SAPO: a smooth gate on the importance ratio in place of a clip."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.losses.arguments import explains_arguments
from forkpoint.losses.base import LossBatch, check_number
from forkpoint.losses.policy_loss import PolicyLoss, log_ratios, ratios
from forkpoint.rollouts.batch import RolloutBatch


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class SAPO(PolicyLoss):
    """Soft adaptive policy optimization (arXiv 2511.20347, eq. 5), token-additive.

    With `r = exp(logprob - old_logprob)` and advantage A, a trained token's objective is

        4 / tau * sigmoid(tau * (r - 1)) * A        tau = tau_pos if A > 0 else tau_neg

    Its gradient is the policy gradient's at r = 1 and fades as the ratio leaves 1. The loss is the
    mean over `denominators.rollouts` of each rollout's mean over its trained tokens, unless
    normalize is "token". The other arguments are described in PolicyLoss.

    tau_pos, tau_neg: how fast it fades, for positive advantages and for all others; above 0. The
        defaults are the paper's.

    Raises ConfigError for arguments that are not allowed.
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
        return self.where_zero(batch, batch.advantages == 0)
