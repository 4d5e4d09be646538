"""Rollouts that a step may leave out, because their loss declares value and gradient to be 0."""

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import ConfigError
from forkpoint.losses.base import Loss, coupling_of
from forkpoint.rollouts.batch import RolloutBatch, short


def zero_rollouts(loss: Loss, batch: RolloutBatch) -> NDArray[np.bool_]:
    """The rollouts that a step of this loss may leave out: bool [N].

    Coupled rollouts are left out only if the loss declares all of them.

    Raises ConfigError if the declaration of the loss is not a bool array [N].
    """
    nothing = np.zeros(len(batch), bool)
    # Missing advantages are zeros, and a loss of advantages refuses such a batch.
    if not _declares(type(loss)) or (loss.uses_advantages and not batch.has_advantages):
        return nothing
    found = loss.zero_rollouts(batch)
    if not isinstance(found, np.ndarray) or found.dtype != bool or found.shape != nothing.shape:
        what = short(found)
        if isinstance(found, np.ndarray):
            what = f"{found.dtype} of shape {found.shape}"
        raise ConfigError(
            f"zero_rollouts of the loss {loss!r} returned {what}; it must return a numpy array of "
            f"bool, one entry for each of the {len(batch)} rollouts."
        )
    if loss.decomposition == "token":
        return found
    coupling = coupling_of(loss, batch)
    return found & ~np.isin(coupling, coupling[~found])


def _declares(kind: type[Loss]) -> bool:
    """Whether the declaration of a class applies to its terms.

    It does not if a subclass of the declaring class overrides a method, which may change the terms.
    """
    for each in kind.__mro__:
        names = vars(each)
        if "zero_rollouts" in names:
            return each is not Loss
        for name, value in names.items():
            is_method = callable(value) or isinstance(value, property | classmethod | staticmethod)
            if is_method and (name == "__call__" or not name.startswith("__")):
                return False
    return False
