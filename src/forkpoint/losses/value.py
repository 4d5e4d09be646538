"""Loss of a critic: the clipped regression of PPO."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from forkpoint.losses.base import (
    Decomposition,
    Loss,
    LossBatch,
    LossOutputs,
    check_choice,
    check_number,
    given,
)
from forkpoint.losses.outputs import Head


@dataclass(frozen=True, kw_only=True)
class ValueLoss(Loss):
    """The clipped regression of a critic's values on returns in PPO, token-additive.

    With the value v of a trained token, its return R and the old value v_old, its term is

        max((v - R)**2, (clamp(v, v_old - clip, v_old + clip) - R)**2) / 2

    as in OpenAI's baselines (ppo2), TRL and verl (`compute_value_loss`). The paper (arXiv
    1707.06347, eq. 9) has the unclipped square. The value of token i is computed from the tokens
    before it, as in verl's slice `values[:, -response_length - 1 : -1]`.

    The loss needs a critic, returns (docs/reference/losses.md shows how to compute them), and with
    clipping old_values. Weights are refused, because they correct the policy gradient.

    Attributes:
        clip: largest distance of a value from the old one with a gradient, above 0; `math.inf`
            means no clipping.
        normalize: "token" or "rollout", as in PolicyLoss.
    """

    decomposition: ClassVar[Decomposition] = "token"
    reads: ClassVar[Head | None] = "values"
    needs: tuple[str, ...] = field(init=False, repr=False, default=("returns", "old_values"))
    takes_weights = False

    clip: float = 0.2
    normalize: Literal["token", "rollout"] = "token"

    def __post_init__(self) -> None:
        check_number("clip", self.clip, positive=True, infinite=True)
        check_choice("normalize", self.normalize, ("token", "rollout"))
        if self.clip == math.inf:
            object.__setattr__(self, "needs", ("returns",))

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        values_T, returns_T = batch.trained(outputs.values), batch.trained(given(batch, "returns"))
        terms_T = (values_T - returns_T).square()
        if self.clip != math.inf:
            old_T = batch.trained(given(batch, "old_values"))
            clipped_T = values_T.clamp(old_T - self.clip, old_T + self.clip)
            terms_T = torch.maximum(terms_T, (clipped_T - returns_T).square())
        return batch.total(terms_T / 2, self.normalize)
