"""Routed experts: the experts that processed each token of a rollout during sampling."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.fields import host_values

MAX_EXPERT = 2**15 - 1
"""Largest index of an expert."""


def read_routed_experts(who: str, values: Any, length: int) -> NDArray[np.int16]:
    """Read the experts of each token: int16 [T, L, K].

    If `values` leaves out the last token, its experts are -1. Raises RolloutError, naming the
    position, for another shape or type and for numbers that are not allowed.
    """
    takes = (
        f"it takes whole numbers of shape [{length}, layers, experts per token], or "
        f"[{max(length - 1, 0)}, ...] without the last token. The experts of a token in a layer "
        "must differ, or all be -1."
    )
    try:
        array = np.asarray(host_values(who, "routed_experts", values))
    except ValueError:
        raise RolloutError(
            f"{who}: routed_experts has lists of different lengths; {takes}"
        ) from None
    if (
        array.ndim != 3
        or array.dtype.kind not in "iu"
        or len(array) not in (length, length - 1)
        or 0 in array.shape[1:]
    ):
        raise RolloutError(
            f"{who}: routed_experts is of shape {array.shape} and type {array.dtype}; {takes}"
        )
    wrong = (array < -1) | (array > MAX_EXPERT)
    if wrong.any():
        at = tuple(int(n) for n in np.argwhere(wrong)[0])
        raise RolloutError(f"{who}: routed_experts{list(at)} is {array[at]}; {takes}")
    found = array.astype(np.int16)
    ordered = np.sort(found, axis=-1)
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1) | (ordered[..., 0] < 0)
    wrong = repeated & (ordered[..., -1] >= 0)
    if wrong.any():
        token, layer = (int(n) for n in np.argwhere(wrong)[0])
        raise RolloutError(
            f"{who}: routed_experts[{token}, {layer}] is {found[token, layer].tolist()}; {takes}"
        )
    if len(found) < length:
        found = np.concatenate([found, np.full((1, *found.shape[1:]), -1, np.int16)])
    return found


def route_index(experts_TLK: NDArray[np.int16]) -> NDArray[np.int64]:
    """int64 [T], equal for tokens with the same experts in all layers, in any order."""
    ordered = np.ascontiguousarray(np.sort(experts_TLK, axis=-1))
    rows = ordered.reshape(len(ordered), -1).view(f"V{ordered[0].nbytes}")[:, 0]
    return np.unique(rows, return_inverse=True)[1].astype(np.int64)
