"""Routed experts: those that each token of a rollout was sent to when it was sampled."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.fields import host_values, short

MAX_EXPERT = 2**15 - 1
"""The largest number of an expert."""


def read_routed_experts(who: str, values: Any, length: int) -> NDArray[np.int16]:
    """Experts of each token, int16 [T, L, K].

    Given for all tokens but the last, that one's are -1.
    """
    takes = (
        f"routed_experts takes whole numbers of shape [{length}, layers, experts of a token], the "
        f"experts that token i was sent to in entry i, or [{max(length - 1, 0)}, ...] without the "
        "last token's. Where the router is to choose by itself all entries of a token in a layer "
        "are -1."
    )
    array = host_values(who, "routed_experts", values)
    if not isinstance(array, np.ndarray):
        try:
            array = np.asarray(array)
        except ValueError:  # lists of different lengths
            raise RolloutError(
                f"{who}: routed_experts has lists of different lengths; {takes}"
            ) from None
    shape = " x ".join(map(str, array.shape))
    if array.ndim != 3 or array.dtype.kind not in "iu" or 0 in array.shape[1:]:
        raise RolloutError(
            f"{who}: routed_experts is of shape ({shape}) and type {array.dtype}; {takes}"
        )
    if len(array) not in (length, length - 1):
        raise RolloutError(
            f"{who}: routed_experts has {len(array)} tokens (shape {shape}), and token_ids has "
            f"{length}; {takes}"
        )
    wrong = (array < -1) | (array > MAX_EXPERT)
    if wrong.any():
        at = tuple(int(n) for n in np.argwhere(wrong)[0])
        raise RolloutError(f"{who}: routed_experts{list(at)} is {array[at]}; {takes}")
    found = array.astype(np.int16)
    ordered = np.sort(found, axis=-1)
    free = ordered[..., -1] < 0
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & ~free
    wrong = repeated | ((ordered[..., 0] < 0) & ~free)
    if wrong.any():
        token, layer = (int(n) for n in np.argwhere(wrong)[0])
        raise RolloutError(
            f"{who}: routed_experts[{token}, {layer}] is {found[token, layer].tolist()}, which are "
            f"not different experts; {takes}"
        )
    if len(found) < length:
        last = np.full((1, *found.shape[1:]), -1, np.int16)
        found = np.concatenate([found, last])
    return found


def join_routed_experts(
    rollout_ids: Sequence[str], given: Sequence[NDArray[np.int16] | None]
) -> NDArray[np.int16] | None:
    """int16 [T, L, K] of all rollouts; None where none has them."""
    if all(experts is None for experts in given):
        return None
    first, wanted = next(
        (name, experts.shape[1:])
        for name, experts in zip(rollout_ids, given, strict=True)
        if experts is not None
    )
    for name, experts in zip(rollout_ids, given, strict=True):
        if experts is None:
            raise RolloutError(
                f"Rollout {short(first)} has routed_experts and rollout {short(name)} has not; a "
                "batch needs it of all of its rollouts or of none. Add what is missing, as -1 "
                "where routers choose, or make two batches."
            )
        if experts.shape[1:] != wanted:
            raise RolloutError(
                f"routed_experts of rollout {short(first)} are of {wanted[0]} layers with "
                f"{wanted[1]} experts a token, and those of rollout {short(name)} of "
                f"{experts.shape[1]} with {experts.shape[2]}; all rollouts are routed by one "
                "model. Make two batches."
            )
    return np.concatenate([experts for experts in given if experts is not None])


def route_index(experts_TLK: NDArray[np.int16]) -> NDArray[np.int64]:
    """int64 [T], equal where a token's experts are, whatever their order."""
    ordered = np.ascontiguousarray(np.sort(experts_TLK, axis=-1))
    rows = ordered.reshape(len(ordered), -1).view(f"V{ordered[0].nbytes}")[:, 0]
    return np.unique(rows, return_inverse=True)[1].astype(np.int64)
