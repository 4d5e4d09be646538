"""forkpoint's own fields, those of Rollout. Imports no torch."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import Rollout
from forkpoint.rollouts.files import REQUIRED, rollout_of
from forkpoint.rollouts.formats.base import Format
from forkpoint.rollouts.formats.record import Record, RecordError, WrongRows, field_of


def _own(record: Record) -> Iterator[Rollout]:
    for key, value in record.values.items():
        if isinstance(value, WrongRows):
            raise RecordError(record.where, key, value.message)
    for name in ("group_id", "rollout_id"):
        if isinstance(record.values.get(name), int):
            record.text(name)  # which refuses numbers of thousands of digits
    try:
        yield rollout_of({key: _plain(value) for key, value in record.values.items()})
    except RolloutError as error:
        missing = [name for name in REQUIRED if name not in record.values]
        field = missing[0] if missing else field_of(error)
        raise RecordError(record.where, field, str(error)) from None


def _plain(value: Any) -> Any:
    """A number or text as Python has it, where a column gave numpy's, and a copy of an array, which
    may be a view of a mapped file."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.item() if isinstance(value, np.generic) else value


FORKPOINT = Format(
    name="forkpoint",
    signatures=(frozenset({"token_ids", "loss_mask"}),),
    key=("token_ids",),
    rollouts=_own,
)
