"""forkpoint's own fields, those of Rollout. Imports no torch."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from forkpoint.errors import RolloutError
from forkpoint.rollout_files import rollout_of
from forkpoint.rollouts import Rollout
from forkpoint.traces.formats.base import Format
from forkpoint.traces.record import Record, RecordError, WrongRows


def _own(record: Record) -> Iterator[Rollout]:
    for key, value in record.values.items():
        if isinstance(value, WrongRows):
            raise RecordError(record.where, key, value.message)
    try:
        yield rollout_of({key: _plain(value) for key, value in record.values.items()})
    except RolloutError as error:
        raise RecordError(record.where, _field(str(error)), str(error)) from None


def _plain(value: Any) -> Any:
    """A number or text as Python has it, where a column gave numpy's; arrays stay."""
    return value.item() if isinstance(value, np.generic) else value


def _field(message: str) -> str:
    names = Rollout.__slots__
    return next((name for name in names if f": {name}" in message), "record")


FORKPOINT = Format(
    name="forkpoint",
    signatures=(frozenset({"token_ids", "loss_mask"}),),
    key=("token_ids",),
    rollouts=_own,
)
