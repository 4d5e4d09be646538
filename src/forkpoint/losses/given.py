"""Numbers that are given beside a batch, such as a critic's values: read, and placed in errors."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.fields import host_values, short


def as_floats(name: str, given: ArrayLike | Tensor) -> NDArray[np.float64]:
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


def place_of(batch: RolloutBatch, position: int) -> tuple[str, int]:
    """The rollout_id at a position of the batch's flat tokens, and the token's number in it."""
    rollout = int(np.searchsorted(batch.offsets, position, side="right")) - 1
    return batch.rollout_ids[rollout], position - int(batch.offsets[rollout])
