"""Weighted log-likelihood: supervised fine-tuning on rollouts that share tokens."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.losses.arguments import explains_arguments
from forkpoint.losses.base import Decomposition, Loss, LossBatch, LossOutputs, check_choice
from forkpoint.rollouts.batch import RolloutBatch


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class LogLikelihood(Loss):
    """The negative log-likelihood of the trained tokens, token-additive.

    A trained token's term is `-w * logprob`, where w are the rollouts' weights, 1 if they have
    none. Advantages and old log-probs play no part. On rollouts that share more than a prompt it is
    supervised fine-tuning on trees: a shared trained token counts once for each rollout that trains
    it, as it does in ordinary fine-tuning.

    normalize: the mean over `denominators.tokens` ("token": the cross-entropy of ordinary
        fine-tuning) or `denominators.rollouts`, as in PolicyLoss; "none" is the sum.
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

    def zero_rollouts(self, batch: RolloutBatch) -> NDArray[np.bool_]:
        if batch.weights is None:
            return np.zeros(len(batch), bool)
        return batch.where_all_trained(batch.weights == 0)


SFT = LogLikelihood
"""The same loss under the field's name."""
