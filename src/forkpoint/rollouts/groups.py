"""Ids of the rollouts of a batch, and the groups that they form."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.fields import short


def check_unique(rollout_ids: Sequence[str | None], what: str) -> None:
    """Raises RolloutError if a rollout_id appears twice. `what`: the collection, such as "a
    batch"."""
    seen: dict[str, int] = {}
    for position, name in enumerate(rollout_ids):
        if name is not None and seen.setdefault(name, position) != position:
            raise RolloutError(
                f"rollout_id {short(name)} is given twice, at positions {seen[name]} and "
                f"{position}; the ids in {what} must differ. Rename one, or leave "
                "rollout_id out."
            )


def fill_ids(rollout_ids: Sequence[str | None]) -> tuple[str, ...]:
    """Fill in missing ids with the position as text, plus underscores if that id exists."""
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
    """Number of tokens before the first trained token of each rollout: int64 [N].

    For a rollout without trained tokens it is the length of the rollout.
    """
    begins, ends = offsets[:-1], offsets[1:]
    bounds = zip(begins.tolist(), ends.tolist(), strict=True)
    first = np.array([loss_mask[begin:end].argmax() for begin, end in bounds], np.int64)
    return np.where(loss_mask[begins + first], first, ends - begins)


def group_index(
    group_ids: Sequence[str | None],
    token_ids: NDArray[np.int64],
    offsets: NDArray[np.int64],
    prompts: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Group of each rollout: int64 [N], numbered in order of first appearance.

    Rollouts without a group_id form a group if their prompts are equal. `prompts`: lengths of the
    prompts, [N].
    """
    numbers: dict[str | bytes, int] = {}
    index = np.empty(len(group_ids), np.int64)
    begins, lengths = offsets.tolist(), prompts.tolist()
    for n, group_id in enumerate(group_ids):
        key: str | bytes | None = group_id
        if key is None:  # bytes, so that no group_id equals it
            key = token_ids[begins[n] : begins[n] + lengths[n]].tobytes()
        index[n] = numbers.setdefault(key, len(numbers))
    return index


def group_of(prompt: NDArray[np.int64] | str) -> str:
    """A group_id that is equal for equal prompts."""
    if isinstance(prompt, str):  # text from JSON may contain half of a surrogate pair
        content = prompt.encode("utf-8", "surrogatepass")
    else:
        content = prompt.astype("<i8").tobytes()
    return f"prompt-{blake2b(content, digest_size=8).hexdigest()}"
