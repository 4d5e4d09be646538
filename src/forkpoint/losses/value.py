"""The critic's side of PPO: its clipped regression, and the advantages that its values give."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.losses.arguments import explains_arguments, explains_arguments_of
from forkpoint.losses.base import (
    Decomposition,
    Loss,
    LossBatch,
    LossOutputs,
    check_choice,
    check_number,
)
from forkpoint.losses.given import place_of, token_numbers
from forkpoint.losses.outputs import Head
from forkpoint.rollouts.batch import RolloutBatch


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class ValueLoss(Loss):
    """The regression of a critic's values on returns as PPO implementations clip it,
    token-additive.

    With the value v of a trained token, its return R and the old value v_old, its term is

        max((v - R)**2, (clamp(v, v_old - clip, v_old + clip) - R)**2) / 2

    as in OpenAI's baselines (ppo2), TRL and verl (`compute_value_loss`); the paper (arXiv
    1707.06347, eq. 9) has the unclipped square. Token i's value is that of the tokens before it,
    the state in which it was chosen: what verl slices as `values[:, -response_length - 1 : -1]`.

    Needs a critic in place of a policy, the rollouts' returns, and with clipping their old_values;
    `losses.gae` makes returns. Weights, which correct the policy gradient, are refused.

    clip: how far a value may leave the old one before its gradient ends, above 0; `math.inf` is no
        clipping.
    normalize: "token" is the sum of the terms over `denominators.tokens`, the trained tokens of the
        whole batch; "rollout" is the mean over `denominators.rollouts` of each rollout's mean over
        its trained tokens, 0 for a rollout without any.

    Raises ConfigError for arguments that are not allowed.
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
        assert batch.returns is not None, "check() was not called"
        values_T, returns_T = batch.trained(outputs.values), batch.trained(batch.returns)
        terms_T = (values_T - returns_T).square()
        if self.clip != math.inf:
            assert batch.old_values is not None, "check() was not called"
            old_T = batch.trained(batch.old_values)
            clipped_T = values_T.clamp(old_T - self.clip, old_T + self.clip)
            terms_T = torch.maximum(terms_T, (clipped_T - returns_T).square())
        return batch.total(terms_T / 2, self.normalize)


class Estimates(NamedTuple):
    """Float64 [T] over a batch's tokens, 0 at those that are not trained."""

    advantages: NDArray[np.float64]
    returns: NDArray[np.float64]


@explains_arguments_of
def gae(
    batch: RolloutBatch,
    values: ArrayLike | Tensor,
    rewards: ArrayLike | Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Estimates:
    """Generalized advantage estimates (J. Schulman et al., arXiv 1506.02438, eq. 16) and returns.

    The trained tokens of a rollout are its actions, one after another; what lies between them, such
    as tool results, belongs to the states. Backwards over them, with V = 0 after the last,

        delta_t     = reward_t + gamma * V_t+1 - V_t
        advantage_t = delta_t + gamma * lam * advantage_t+1
        return_t    = advantage_t + V_t

    Rollouts are estimated each on its own: where they share a trained token, its value is the same
    and its advantages and returns differ. Nothing is normalised.

    values: [T] over the batch's tokens in their order, as `policy.score(batch).values` of a critic
        gives them; entries outside the loss mask are ignored.
    rewards: [N], one per rollout, which goes to its last trained token; or [T], one per token, 0 at
        those that are not trained. The reward of a rollout without trained tokens is not used.
    gamma, lam: discount and lambda, from 0 to 1.

    Raises ConfigError for a gamma or lam that is not allowed, RolloutError where values or rewards
    do not fit the batch.
    """
    for name, number in (("gamma", gamma), ("lam", lam)):
        check_number(name, number)
        if number > 1:
            raise ConfigError(f"{name} is {number!r}; it takes a number from 0 to 1.")
    trained = np.flatnonzero(batch.loss_mask)
    rollout = np.repeat(np.arange(len(batch)), batch.lengths)[trained]
    counts = np.bincount(rollout, minlength=len(batch))
    step = np.arange(len(trained)) - np.repeat(np.cumsum(counts) - counts, counts)

    values_T = token_numbers(batch, "values", values, (batch.logical_tokens,))
    rewards_T = token_numbers(batch, "rewards", rewards, (len(batch), batch.logical_tokens))
    if len(rewards_T) != batch.logical_tokens:
        last = step == counts[rollout] - 1
        per_rollout, rewards_T = rewards_T, np.zeros(batch.logical_tokens)
        rewards_T[trained[last]] = per_rollout[rollout[last]]
    lost = (rewards_T != 0) & ~batch.loss_mask
    if lost.any():
        position = int(lost.argmax())
        raise RolloutError(
            f"{place_of(batch, position)} has the reward {rewards_T[position]}, but is not "
            "trained, so that no advantage would hold it. Give it to a trained token, such as the "
            "one before it."
        )

    # Actions of rollouts in rows, one column a step; the columns after the last are 0.
    shape = (len(batch), int(counts.max(initial=0)) + 1)
    values_NS, rewards_NS = np.zeros(shape), np.zeros(shape)
    values_NS[rollout, step], rewards_NS[rollout, step] = values_T[trained], rewards_T[trained]
    advantages_NS = np.zeros(shape)
    for s in range(shape[1] - 2, -1, -1):
        delta_N = rewards_NS[:, s] + gamma * values_NS[:, s + 1] - values_NS[:, s]
        advantages_NS[:, s] = delta_N + gamma * lam * advantages_NS[:, s + 1]
    advantages_T, returns_T = np.zeros(batch.logical_tokens), np.zeros(batch.logical_tokens)
    advantages_T[trained] = advantages_NS[rollout, step]
    returns_T[trained] = advantages_T[trained] + values_T[trained]
    return Estimates(advantages_T, returns_T)
