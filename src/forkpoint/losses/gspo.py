"""GSPO: the clipped surrogate with one importance ratio per rollout."""

from dataclasses import dataclass

from torch import Tensor

from forkpoint.losses.base import Loss, LossBatch, LossOutputs, check_number, divide
from forkpoint.losses.grpo import clipped_surrogate, log_ratios


@dataclass(frozen=True, kw_only=True)
class GSPO(Loss):
    """Group sequence policy optimization (arXiv 2507.18071), rollout-additive.

    With the means over the rollout's trained tokens

        s = exp(mean(logprob - old_logprob))        A = mean(advantage)

    a rollout's term is `-min(s * A, clamp(s, 1 - clip, 1 + clip_high) * A)`, and the loss their sum
    over `denominators.rollouts`. A rollout without trained tokens contributes 0 and is counted.

    clip, clip_high: as in GRPO, but of a ratio per rollout and hence far smaller; the defaults are
        the paper's. clip_high None is clip.

    Without old_logprobs the update is on-policy: `old_logprob = logprob.detach()`. Weights of
    tokens have no place in a ratio of rollouts and are refused.

    Raises ConfigError for arguments that are not allowed.
    """

    decomposition = "rollout"
    takes_weights = False

    clip: float = 3e-4
    clip_high: float | None = 4e-4

    def __post_init__(self) -> None:
        check_number("clip", self.clip, infinite=True)
        if self.clip_high is not None:
            check_number("clip_high", self.clip_high, infinite=True)

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        ratios_n = batch.rollout_mean(log_ratios(batch.trained(outputs.logprobs), batch)).exp()
        advantages_n = batch.rollout_mean(batch.advantages)
        terms_n = -clipped_surrogate(ratios_n, advantages_n, self.clip, self.clip_high)
        return divide(terms_n.sum(), batch.denominators.rollouts)
