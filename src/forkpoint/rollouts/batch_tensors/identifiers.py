"""Ids of the rollouts of a batch, and the groups that they form."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch_tensors.cells import WHO, on_host, shape_text
from forkpoint.rollouts.fields import read_identifier, short


def read_each(
    field: str, values: Any, count: int, read: Callable[[str, str, Any], Any], takes: str
) -> list[Any]:
    """One value per rollout, as `read` returns it; N times None for None.

    Raises RolloutError unless `values` is a list, a tuple, an array or a tensor [N].
    """
    if values is None:
        return [None] * count
    values = on_host(field, values)
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            shape = shape_text(values.shape)
            raise RolloutError(f"{WHO}: {field} has the shape {shape}; it takes {takes}")
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise RolloutError(
            f"{WHO}: {field} is {short(values)} of type {type(values).__name__}; it takes {takes}"
        )
    if len(values) != count:
        raise RolloutError(
            f"{WHO}: {field} has {len(values)} entries, but there are {count} rollouts; it "
            f"takes {takes}"
        )
    return [read(WHO, f"{field}[{n}]", value) for n, value in enumerate(values)]


def read_ids(field: str, values: Any, count: int) -> list[str | None]:
    """Ids [N] as text, or None where there is none; whole numbers become text."""
    takes = "one text, whole number or None per rollout, in a list, an array or a tensor [N]."
    return read_each(field, values, count, read_identifier, takes)


def read_extras(who: str, field: str, value: Any) -> dict[str, Any] | None:
    """Extras of one rollout: a dict or None."""
    if value is not None and not isinstance(value, dict):
        raise RolloutError(
            f"{who}: {field} is {short(value)}; it takes a dict or None. Put the value into a "
            "dict under a key of its own."
        )
    return value


def check_unique(rollout_ids: Sequence[str | None], what: str) -> None:
    """Raises RolloutError where a rollout_id is there twice in `what`, such as "a batch"."""
    seen: dict[str, int] = {}
    for position, name in enumerate(rollout_ids):
        if name is not None and seen.setdefault(name, position) != position:
            raise RolloutError(
                f"rollout_id {short(name)} is given twice, at positions {seen[name]} and "
                f"{position}; each rollout of {what} needs its own. Rename one, or leave "
                "rollout_id out."
            )


def fill_ids(rollout_ids: Sequence[str | None]) -> tuple[str, ...]:
    """The ids, with the position as text, and underscores where it is taken, for those missing."""
    taken = set(rollout_ids)
    filled: list[str] = []
    for position, name in enumerate(rollout_ids):
        if name is None:
            name = str(position)
            while name in taken:
                name += "_"
            taken.add(name)
        filled.append(name)
    return tuple(filled)


def prompt_lengths(loss_mask: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The tokens of each rollout before its first trained one, or all if none is: int64 [N]."""
    lengths = np.diff(offsets)
    for n, (begin, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=False)):
        first = int(loss_mask[begin : begin + length].argmax())
        if loss_mask[begin + first]:
            lengths[n] = first
    return lengths


def group_index(
    group_ids: Sequence[str | None],
    token_ids: NDArray[np.int64],
    offsets: NDArray[np.int64],
    prompts: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The group of each rollout, int64 [N], numbered in order of first appearance.

    Rollouts without a group_id form one group where their prompts are equal; `prompts` are the
    lengths of these, [N].
    """
    numbers: dict[str | bytes, int] = {}
    index = np.empty(len(group_ids), np.int64)
    begins, lengths = offsets.tolist(), prompts.tolist()
    for n, group_id in enumerate(group_ids):
        key: str | bytes | None = group_id
        if key is None:  # bytes, so that no group_id can be equal to it
            key = token_ids[begins[n] : begins[n] + lengths[n]].tobytes()
        index[n] = numbers.setdefault(key, len(numbers))
    return index


def group_of(prompt: NDArray[np.int64] | str) -> str:
    """A group_id that is equal for equal prompts."""
    if isinstance(prompt, str):  # which may hold half a surrogate pair, as JSON may
        content = prompt.encode("utf-8", "surrogatepass")
    else:
        content = prompt.astype("<i8").tobytes()
    return f"prompt-{blake2b(content, digest_size=8).hexdigest()}"


def groups_of_given_prompts(
    group_ids: Sequence[str | None],
    token_ids: NDArray[np.int64],
    loss_mask: NDArray[np.bool_],
    offsets: NDArray[np.int64],
    prompts: NDArray[np.int64],
) -> tuple[tuple[str | None, ...], NDArray[np.int64]]:
    """The group_ids and the group index of rollouts whose prompts are known: their lengths, [N].

    Where a loss mask begins later than a completion, the rollouts alone would be grouped by more
    than their prompts. If that makes other groups, those without a group_id get one that stands for
    the prompt, so that whatever is made of the rollouts keeps the groups.
    """
    index = group_index(group_ids, token_ids, offsets, prompts)
    alone = group_index(group_ids, token_ids, offsets, prompt_lengths(loss_mask, offsets))
    if np.array_equal(index, alone):
        return tuple(group_ids), index
    begins, ends = offsets.tolist(), (offsets[:-1] + prompts).tolist()
    filled = [
        group_of(token_ids[begins[n] : ends[n]]) if group_id is None else group_id
        for n, group_id in enumerate(group_ids)
    ]
    return tuple(filled), index
