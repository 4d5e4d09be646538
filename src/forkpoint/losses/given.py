"""Numbers that are given beside a batch, such as a critic's values: read, and placed in errors."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.fields import host_values, short


def _as_floats(name: str, given: ArrayLike | Tensor) -> NDArray[np.float64]:
    """A list, an array or a tensor (any device, floating dtype and strides) as float64.

    None in a list becomes NaN. Raises RolloutError, naming `name`, for anything else.
    """
    read = host_values("The argument", name, given)
    try:
        return np.asarray(read, np.float64)
    except (TypeError, ValueError) as error:
        raise RolloutError(
            f"{name} is {short(given)}, which cannot be read as numbers ({error}). Give a flat "
            "list, an array or a tensor of numbers."
        ) from None


def token_numbers(
    batch: RolloutBatch, name: str, given: ArrayLike | Tensor, lengths: tuple[int, ...]
) -> NDArray[np.float64]:
    """The numbers as float64 of one of the lengths, finite where tokens are trained."""
    array = _as_floats(name, given)
    if array.ndim != 1 or len(array) not in lengths:
        wanted = f"{batch.logical_tokens} tokens"
        if len(lengths) > 1:
            wanted = f"{len(batch)} rollouts and {wanted}; it takes one number per rollout, or"
        else:
            wanted += "; it takes"
        raise RolloutError(
            f"{name} has the shape {array.shape}, and the batch has {wanted} one number per token, "
            "of all rollouts one after another."
        )
    per_token = len(array) == batch.logical_tokens
    refused = ~np.isfinite(array) & (batch.loss_mask if per_token else True)
    if refused.any():
        position = int(refused.argmax())
        where = (
            place_of(batch, position) if per_token else f"Rollout {batch.rollout_ids[position]!r}"
        )
        raise RolloutError(f"{where}: {name} is {array[position]}; it takes finite numbers.")
    return array


def place_of(batch: RolloutBatch, position: int) -> str:
    """The rollout and the token at a position of the batch's flat tokens, for messages."""
    rollout = int(np.searchsorted(batch.offsets, position, side="right")) - 1
    token = position - int(batch.offsets[rollout])
    return f"Rollout {batch.rollout_ids[rollout]!r}, token {token}"
