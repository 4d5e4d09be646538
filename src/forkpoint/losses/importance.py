"""Weights that correct for a sampler whose probabilities are not the trainer's."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.losses.arguments import explains_arguments_of
from forkpoint.losses.base import check_choice, check_number
from forkpoint.losses.given import place_of, token_numbers
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.rollout import LARGEST_LOGPROB, LOGPROBS_ARE_NEGATIVE


@explains_arguments_of
def importance_weights(
    batch: RolloutBatch,
    sampler_logprobs: ArrayLike | Tensor,
    *,
    mode: Literal["truncate", "mask"] = "truncate",
    level: Literal["token", "sequence"] = "token",
    cap: float = 2.0,
    floor: float = 0.0,
) -> NDArray[np.float64]:
    """Importance-sampling weights from sampler to trainer, for the rollouts' `weights`.

    An inference engine's probabilities differ from the trainer's even with the same parameters. A
    token's ratio is exp(old_logprob - sampler_logprob), where the batch's old_logprobs are the
    trainer's own (policy.score) before the step; a rollout's is their product over its trained
    tokens. Losses multiply their policy term by the weights, not the KL or entropy term, and
    weights do not enter denominators: a token of weight 0 still counts in means. Clear it in the
    loss mask to leave it out of them as well.

    sampler_logprobs: [T] over the batch's tokens in their order, as a list, array or tensor;
        log-probs, at most 0 apart from rounding; entries outside the loss mask are ignored.
    mode: "truncate" moves ratios into [floor, cap] (truncated importance sampling, TIS: F. Yao et
        al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025); "mask"
        gives those outside of it the weight 0 (masked importance sampling, MIS; with a floor,
        IcePop, arXiv 2510.18855).
    level: "token" weighs each token by its own ratio, "sequence" all tokens of a rollout by the
        rollout's.
    cap, floor: bounds of the ratios; cap above 0 (`math.inf` is none), floor from 0 to cap.

    Returns float64 [T]; 1 at tokens that are not trained.

    Raises ConfigError for arguments that are not allowed, RolloutError where the batch has no
    old_logprobs or sampler_logprobs do not fit it.
    """
    check_choice("mode", mode, ("truncate", "mask"))
    check_choice("level", level, ("token", "sequence"))
    check_number("cap", cap, positive=True, infinite=True)
    check_number("floor", floor)
    if floor > cap:
        raise ConfigError(f"floor is {floor!r} and cap is {cap!r}; floor is at most cap.")
    if batch.old_logprobs is None:
        raise RolloutError(
            "importance_weights needs old_logprobs, but the rollouts have none. Give every Rollout "
            "its old_logprobs; policy.score(batch) computes them under the model to be trained."
        )
    sampler_T = token_numbers(batch, "sampler_logprobs", sampler_logprobs, (batch.logical_tokens,))
    mask = batch.loss_mask
    above = mask & (sampler_T > LARGEST_LOGPROB)
    if above.any():
        position = int(above.argmax())
        raise RolloutError(
            f"{place_of(batch, position)}: sampler_logprobs is {sampler_T[position]}, and "
            f"old_logprobs is {batch.old_logprobs[position]}; {LOGPROBS_ARE_NEGATIVE}"
        )
    log_ratios_T = np.where(mask, batch.old_logprobs - np.where(mask, sampler_T, 0), 0)
    if level == "sequence":
        lengths = np.diff(batch.offsets)
        rollout_T = np.repeat(np.arange(len(lengths)), lengths)
        log_ratios_T = np.bincount(rollout_T, log_ratios_T, len(lengths))[rollout_T]
    # Products over long rollouts overflow float64; where they would, they are above any cap.
    with np.errstate(over="ignore"):
        ratios_T = np.exp(log_ratios_T)
    if mode == "truncate":
        weights_T = ratios_T.clip(floor, cap)
    else:
        weights_T = np.where((ratios_T >= floor) & (ratios_T <= cap), ratios_T, 0)
    return np.where(mask, weights_T, 1)
