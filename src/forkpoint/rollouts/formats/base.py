"""Formats of trainers: their interface. Imports no torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.rollouts.batch import Rollout
from forkpoint.rollouts.formats.record import Record, make

MEDIA = (
    *("multi_modal_inputs", "multi_modal_data", "pixel_values", "image_grid_thw", "mm_kwargs"),
    *("multimodal_inputs", "multimodal_train_inputs", "images", "mm_train_inputs"),
)
"""Fields of any trainer that hold what is no token."""
NO_TEMPERATURE = (
    "This format does not say the sampling temperature; 1 is taken. If it was another, log-probs "
    "and gradients differ."
)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format by its name, what tells it, and how a record of it becomes rollouts.

    signatures: sets of keys; a record with all keys of one of them is of this format ...
    without: ... unless it has one of these keys.
    key: fields of which the first that is there tells, by its nesting, a batch from one sample.
    rollouts: the rollouts of one record, almost always one.
    text: whether `key` is text, so that a list of texts is a batch.
    notes: what a reader of the rollouts has to know.
    """

    name: str
    signatures: tuple[frozenset[str], ...]
    without: frozenset[str] = frozenset()
    key: tuple[str, ...]
    rollouts: Callable[[Record], Iterator[Rollout]]
    text: bool = False
    notes: tuple[str, ...] = field(default=())

    def matches(self, keys: frozenset[str]) -> bool:
        return any(s <= keys for s in self.signatures) and not self.without & keys


def made(
    record: Record, names: dict[str, str], *, reward: float | None = None, **values: Any
) -> Rollout:
    """The rollout of a record.

    Args:
        record: the record.
        names: for fields of Rollout, the field of the record that each was read from.
        reward: what an advantage is made of where `values` has none; the record is then marked, so
            that the reader makes advantages of the rewards of whole groups.
        values: the fields of Rollout.
    """
    if values.get("advantage") is None:
        if reward is None:
            wanted = names.get("advantage", "advantage")
            raise record.fail(wanted, f"there is no {wanted}, and no reward to make one of.")
        values |= {"advantage": reward, "extras": {"reward": reward}}
        record.rewarded = True
    temperature = record.number("temperature")
    if temperature is not None:
        values["temperature"] = temperature
    return make(record, names, **values)


def before_first(ids: NDArray[np.int64], trained: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The tokens before the first trained one: the prompt; all of them where none is."""
    return ids[: int(trained.argmax()) if trained.any() else len(ids)]
