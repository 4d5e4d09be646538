"""Advantages and returns for rollouts, computed before a step."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.losses.base import check_number
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.fields import host_values, short


class Estimates(NamedTuple):
    """Float64 [T] over a batch's tokens, 0 at those that are not trained."""

    advantages: NDArray[np.float64]
    returns: NDArray[np.float64]


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

    Args:
        values: [T] over the batch's tokens in their order, as `policy.score(batch).values` of a
            critic gives them; entries outside the loss mask are ignored.
        rewards: [N], one per rollout, which goes to its last trained token; or [T], one per token,
            0 at those that are not trained. The reward of a rollout without trained tokens is not
            used.
        gamma: discount, from 0 to 1.
        lam: lambda of the estimates, from 0 to 1.

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


def token_numbers(
    batch: RolloutBatch, name: str, given: ArrayLike | Tensor, lengths: tuple[int, ...]
) -> NDArray[np.float64]:
    """A list, an array or a tensor (any device, floating dtype and strides) as float64.

    Raises RolloutError unless it has one of the lengths, and is finite where tokens are trained.
    """
    read = host_values("The argument", name, given)
    try:
        array = np.asarray(read, np.float64)
    except (TypeError, ValueError) as error:
        raise RolloutError(
            f"{name} is {short(read)}, which cannot be read as numbers ({error}). Give a flat "
            "list, an array or a tensor of numbers."
        ) from None
    if array.ndim != 1 or len(array) not in lengths:
        wanted = f"{batch.logical_tokens} tokens; it takes"
        if len(lengths) > 1:
            wanted = f"{len(batch)} rollouts and {wanted} one number per rollout, or"
        raise RolloutError(
            f"{name} has the shape {array.shape}, and the batch has {wanted} one number per token, "
            "of all rollouts one after another."
        )
    per_token = len(array) == batch.logical_tokens
    refused = ~np.isfinite(array) & (batch.loss_mask if per_token else True)
    if refused.any():
        at = int(refused.argmax())
        where = place_of(batch, at) if per_token else f"Rollout {batch.rollout_ids[at]!r}"
        raise RolloutError(f"{where}: {name} is {array[at]}; it takes finite numbers.")
    return array


def place_of(batch: RolloutBatch, position: int) -> str:
    """The rollout and the token at a position of the batch's flat tokens, for messages."""
    rollout = int(np.searchsorted(batch.offsets, position, side="right")) - 1
    token = position - int(batch.offsets[rollout])
    return f"Rollout {batch.rollout_ids[rollout]!r}, token {token}"
