"""The samples of a table: what a file holds at one place may be one of them or many."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from forkpoint.rollouts.formats.base import Format
from forkpoint.rollouts.formats.containers import SHARED
from forkpoint.rollouts.formats.record import Record, Row, WrongRows, named


def samples(
    where: str,
    table: Mapping[str, Any],
    format: Format,
    tokenizer: Callable[[str], list[int]] | None,
) -> Iterator[Record]:
    """The samples of a table, or the one sample that it is."""
    settings = table.get(SHARED)
    shared: dict[str, Any] = dict(settings) if isinstance(settings, Mapping) else {}
    key = next((name for name in format.key if table.get(name) is not None), None)
    if key is None or not _nested(table[key], text=format.text):
        yield Record(where, {**shared, **table}, tokenizer)
        return
    count = len(table[key])
    columns: dict[str, Any] = {}
    for name, value in table.items():
        if not isinstance(value, list) and not (isinstance(value, np.ndarray) and value.ndim):
            shared[name] = value
        elif len(value) == count:
            columns[name] = value
        elif isinstance(value, list) and not value:
            shared[name] = None  # a field that was never filled
        else:  # an error if the format has a use for it
            shared[name] = WrongRows(
                f"{named(name)} has {len(value)} rows, but {key} has {count}. Where {key} holds "
                "lists, each is a rollout, and every other list has as many entries; one rollout "
                "has one list of ids."
            )
    for row in range(count):
        values = Row({name: column[row] for name, column in columns.items()}, shared)
        yield Record(f"{where}, row {row}", values, tokenizer)


def _nested(value: Any, *, text: bool) -> bool:
    """Whether the values of many samples are in it: rows of tokens, or texts where one is text."""
    if isinstance(value, np.ndarray) and value.ndim != 1:
        return value.ndim > 1
    if not isinstance(value, list | np.ndarray) or not len(value):
        return False
    return isinstance(value[0], str if text else list | tuple | np.ndarray)
