"""Losses of preference pairs, whose two rollouts share their prompt: DPO, its variants, and
SimPO."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.losses.base import (
    Decomposition,
    Loss,
    LossBatch,
    LossOutputs,
    check_choice,
    check_number,
    divide,
    given,
)
from forkpoint.rollouts.batch import RolloutBatch


class PairLoss(Loss):
    """A loss of pairs, joint over pairs. Each group is a pair.

    The rollout with the larger advantage is the chosen one, and the other is the rejected one.
    Weights of tokens are refused.
    """

    decomposition: ClassVar[Decomposition] = "joint"
    takes_weights = False
    uses_advantages = True

    def check(self, batch: RolloutBatch) -> None:
        super().check(batch)
        self.check_pairs(batch)

    def check_pairs(self, batch: RolloutBatch) -> None:
        """Raises RolloutError, naming the first group that is not a pair with a preference."""
        name = type(self).__name__
        for members in batch.groups():
            names = ", ".join(repr(batch.rollout_ids[n]) for n in members)
            who = f"Group {batch.group_ids[members[0]] or batch.group_index[members[0]]} ({names})"
            if len(members) != 2:
                raise RolloutError(
                    f"{who}: {name} takes exactly two rollouts a group, the chosen and the "
                    f"rejected one, not {len(members)}. Give each pair a different group_id, and "
                    "both of its rollouts to one rank."
                )
            preferences = [_preference(batch, n, who, name) for n in members]
            if preferences[0] == preferences[1]:
                raise RolloutError(
                    f"{who} has the advantage {preferences[0]} twice; {name} chooses the rollout "
                    "with the larger advantage. Give the chosen rollout 1 and the rejected one 0."
                )

    def coupling(self, batch: RolloutBatch) -> NDArray[np.int64]:
        return batch.group_index


@dataclass(frozen=True, kw_only=True)
class DPO(PairLoss):
    """Direct preference optimization (arXiv 2305.18290, eq. 7), joint over pairs.

    With sums over the trained tokens of the chosen (c) and the rejected rollout (r), the margin of
    a pair is

        m = sum_c(logprob - reference) - sum_r(logprob - reference)

    The loss is the sum of the terms of all pairs, divided by `denominators.groups`. It needs
    reference_logprobs. With label smoothing e, the term of each variant is

        "sigmoid"  -(1 - e) * log_sigmoid(beta * m) - e * log_sigmoid(-beta * m)
        "robust"   (-(1 - e) * log_sigmoid(beta * m) + e * log_sigmoid(-beta * m)) / (1 - 2 * e)
        "hinge"    max(0, 1 - beta * m)
        "ipo"      (m - 1 / (2 * beta)) ** 2

    Sources: E. Mitchell, A note on DPO with noisy preferences, 2023, eq. 3 (label smoothing: cDPO);
    arXiv 2403.00409 (robust); arXiv 2309.06657, after SLiC, arXiv 2305.10425 (hinge); arXiv
    2310.12036, eq. 17, with tau for beta (ipo).

    Attributes:
        variant: name of the term above.
        beta: scale of the margin, above 0. A larger beta keeps the policy closer to the reference.
        label_smoothing: e, the probability that the labels of a pair are exchanged, from 0 to below
            0.5. Above 0 for "sigmoid" and "robust" only.
        length_normalized: whether to take means over the trained tokens instead of sums, as TRL
            does for the variant "ipo".
    """

    needs: tuple[str, ...] = field(init=False, repr=False, default=("reference_logprobs",))

    beta: float = 0.1
    variant: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid"
    label_smoothing: float = 0.0
    length_normalized: bool = False

    def __post_init__(self) -> None:
        check_number("beta", self.beta, positive=True)
        check_choice("variant", self.variant, ("sigmoid", "robust", "hinge", "ipo"))
        check_number("label_smoothing", self.label_smoothing)
        if self.label_smoothing >= 0.5:
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing!r}; it takes a number below 0.5. At 0.5 "
                "both rollouts count equally, and above 0.5 the rejected rollout is preferred."
            )
        if self.label_smoothing and self.variant not in ("sigmoid", "robust"):
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing!r}, but the variant {self.variant!r} "
                "has none; allowed are 'sigmoid' and 'robust', or a label_smoothing of 0."
            )

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        differences_T = outputs.logprobs - given(batch, "reference_logprobs")
        margins_P = _margins(differences_T, batch, mean=self.length_normalized)
        return divide(self._terms(margins_P).sum(), batch.denominators.groups)

    def _terms(self, margins_P: Tensor) -> Tensor:
        if self.variant == "ipo":
            return (margins_P - 1 / (2 * self.beta)).square()
        logits_P = self.beta * margins_P
        if self.variant == "hinge":
            return (1 - logits_P).relu()
        right_P, wrong_P = -F.logsigmoid(logits_P), -F.logsigmoid(-logits_P)
        smoothing = self.label_smoothing
        if self.variant == "robust":
            return ((1 - smoothing) * right_P - smoothing * wrong_P) / (1 - 2 * smoothing)
        return (1 - smoothing) * right_P + smoothing * wrong_P


@dataclass(frozen=True, kw_only=True)
class SimPO(PairLoss):
    """Simple preference optimization (arXiv 2405.14734), joint over pairs, without a reference.

    With means over the trained tokens of the chosen (c) and the rejected rollout (r), the term of a
    pair is

        -log_sigmoid(beta * (mean_c(logprob) - mean_r(logprob)) - gamma)

    The loss is the sum of the terms of all pairs, divided by `denominators.groups`.

    Attributes:
        beta: scale of the rewards, above 0.
        gamma: target margin between the rewards, at least 0. The paper tunes it together with beta.
            The default is that of TRL and of the authors' code (0.25 * beta).
    """

    beta: float = 2.0
    gamma: float = 0.5

    def __post_init__(self) -> None:
        check_number("beta", self.beta, positive=True)
        check_number("gamma", self.gamma)

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        margins_P = _margins(outputs.logprobs, batch, mean=True)
        terms_P = -F.logsigmoid(self.beta * margins_P - self.gamma)
        return divide(terms_P.sum(), batch.denominators.groups)


def _margins(values_T: Tensor, batch: LossBatch, *, mean: bool) -> Tensor:
    """Difference of the sums (or means) of values of the chosen and the rejected rollout, for each
    pair."""
    values_T = batch.trained(values_T)
    rewards_n = batch.rollout_mean(values_T) if mean else batch.rollout_sum(values_T)
    advantages_n = _rollout_max(batch)
    # Each group has two rollouts, so pairs are adjacent after sorting by group.
    first_P, second_P = batch.group_index.argsort().view(-1, 2).unbind(1)
    sign_P = torch.sign(advantages_n[first_P] - advantages_n[second_P])
    return sign_P * (rewards_n[first_P] - rewards_n[second_P])


def _preference(batch: RolloutBatch, index: int, who: str, loss: str) -> np.float32:
    """The advantage of a rollout's trained tokens, in the precision of the loss."""
    tokens = slice(*batch.offsets[index : index + 2])
    values = np.unique(batch.advantages[tokens][batch.loss_mask[tokens]].astype(np.float32))
    if len(values) != 1:
        problem = "advantages that differ between" if len(values) else "no"
        raise RolloutError(
            f"{who}: rollout {batch.rollout_ids[index]!r} has {problem} trained tokens; {loss} "
            "compares two rollouts by one advantage each, at their trained tokens. Give the "
            "rollout a single advantage and train at least one token, or leave the pair out."
        )
    return values[0]


def _rollout_max(batch: LossBatch) -> Tensor:
    """Advantage of each rollout: [n]. The maximum of equal numbers is exact, unlike their mean."""
    advantages_T = torch.where(batch.loss_mask, batch.advantages, -torch.inf)
    lowest_n = advantages_T.new_full((len(batch.rollout_ids),), -torch.inf)
    return lowest_n.scatter_reduce(0, batch.token_rollout, advantages_T, "amax")
