"""DPO: preference pairs, whose two rollouts share their prompt."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import RolloutError
from forkpoint.losses.base import Loss, LossBatch, LossOutputs, check_number, divide
from forkpoint.rollouts import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class DPO(Loss):
    """Direct preference optimization (arXiv 2305.18290, eq. 7), joint over pairs.

    A group is a pair; of its two rollouts the one with the larger advantage is chosen (c), the
    other rejected (r). With sums over each rollout's trained tokens, a pair's term is

        -log_sigmoid(beta * (sum_c(logprob - reference) - sum_r(logprob - reference)))

    and the loss their sum over `denominators.groups`. Needs reference_logprobs; weights of tokens
    are refused.

    beta: how strongly the policy is held to the reference; above 0.

    Raises ConfigError for a beta that is not allowed.
    """

    decomposition = "joint"
    needs = ("reference_logprobs",)
    takes_weights = False

    beta: float = 0.1

    def __post_init__(self) -> None:
        check_number("beta", self.beta, positive=True)

    def check(self, batch: RolloutBatch) -> None:
        """Raises RolloutError, naming the first group that is no pair with a preference."""
        super().check(batch)
        for members in batch.groups():
            names = ", ".join(repr(batch.rollout_ids[n]) for n in members)
            who = f"Group {batch.group_ids[members[0]] or batch.group_index[members[0]]} ({names})"
            if len(members) != 2:
                raise RolloutError(
                    f"{who}: DPO takes exactly two rollouts a group, the chosen and the rejected "
                    f"one, not {len(members)}. Give each pair a group_id of its own."
                )
            preferences = [_preference(batch, n, who) for n in members]
            if preferences[0] == preferences[1]:
                raise RolloutError(
                    f"{who} has the advantage {preferences[0]} twice; of a pair's rollouts DPO "
                    "chooses the one with the larger advantage. Give the chosen one 1, say, and "
                    "the rejected one 0."
                )

    def coupling(self, batch: RolloutBatch) -> NDArray[np.int64]:
        return batch.group_index

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        assert batch.reference_logprobs is not None, "check() was not called"
        rewards_n = batch.rollout_sum(batch.trained(outputs.logprobs - batch.reference_logprobs))
        advantages_n = _rollout_max(batch)
        # Each group is there twice, so sorted by group the pairs lie next to each other.
        first_P, second_P = batch.group_index.argsort().view(-1, 2).unbind(1)
        sign_P = torch.sign(advantages_n[first_P] - advantages_n[second_P])
        margins_P = sign_P * (rewards_n[first_P] - rewards_n[second_P])
        return divide(-F.logsigmoid(self.beta * margins_P).sum(), batch.denominators.groups)


def _preference(batch: RolloutBatch, index: int, who: str) -> np.float32:
    """The advantage of a rollout's trained tokens, in the precision in which the loss compares."""
    tokens = slice(*batch.offsets[index : index + 2])
    values = np.unique(batch.advantages[tokens][batch.loss_mask[tokens]].astype(np.float32))
    if len(values) != 1:
        problem = "advantages that differ between" if len(values) else "no"
        raise RolloutError(
            f"{who}: rollout {batch.rollout_ids[index]!r} has {problem} trained tokens; DPO "
            "compares two rollouts by one advantage each, at their trained tokens. Give the "
            "rollout a single advantage and train at least one token, or leave the pair out."
        )
    return values[0]


def _rollout_max(batch: LossBatch) -> Tensor:
    """Each rollout's advantage: [n]. A maximum of equal numbers is exact, as a mean is not."""
    advantages_T = torch.where(batch.loss_mask, batch.advantages, -torch.inf)
    lowest_n = advantages_T.new_full((len(batch.rollout_ids),), -torch.inf)
    return lowest_n.scatter_reduce(0, batch.token_rollout, advantages_T, "amax")
