"""Recorder of traces: the batches of a training loop. Imports no torch."""

import json
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forkpoint.errors import ConfigError, TraceError
from forkpoint.rollouts.batch import Rollout, RolloutBatch, check_rollouts, short
from forkpoint.rollouts.disk import TEMPORARY, write_file
from forkpoint.rollouts.fields import host_values
from forkpoint.rollouts.files import as_path, check_writable
from forkpoint.rollouts.formats.limits import MemoryLimit
from forkpoint.rollouts.traces.batch_file import Arrays, encode
from forkpoint.rollouts.traces.trace import (
    KIND,
    SCHEMA,
    SETTINGS,
    Trace,
    batch_files,
    batch_name,
    is_trace,
)
from forkpoint.version import __version__

MOST_ITEM_BYTES = 8
"""Largest size of a number in an array of a batch file."""


def record(
    path: str | os.PathLike[str],
    *,
    notes: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> "Recorder":
    """Record a trace into the folder `path`: `with record(path) as t: t.add(batch, loss_inputs)`.

    Args:
        path: a folder that does not exist or is empty. It is made.
        notes: JSON values that are stored in the trace, such as settings of the model, the loss
            and the optimizer.
        resume: whether to continue the trace in `path`. Then notes must equal those of the trace,
            or be None. If `path` has no trace, a new one is started.

    Use one recorder per folder at a time; forkpoint does not check this. A trace can be read while
    it is recorded.

    Returns:
        The recorder, which is a context manager.

    Raises:
        ConfigError: JSON cannot represent the notes, or `path` has another type.
        TraceError: `path` is not empty; or, with `resume`, it is not a trace, is damaged, or was
            recorded with other notes.
    """
    if not isinstance(notes, Mapping | None):
        raise ConfigError(
            f"notes is {short(notes)} of type {type(notes).__name__}; it takes a mapping."
        )
    return Recorder(as_path(path, "a folder"), _json(notes, "notes"), resume=resume)


class Recorder:
    """Writes batches to a trace. `record` makes it."""

    def __init__(self, path: Path, notes: dict[str, Any] | None, *, resume: bool) -> None:
        self.path = path
        self._adding = threading.Lock()
        if path.exists() and not path.is_dir():
            raise TraceError(f"{path} is a file; a trace is a folder. Give another path.")
        path.mkdir(parents=True, exist_ok=True)
        if not (resume and is_trace(path)):
            self._begin(notes)
        self._check_notes(Trace(path, MemoryLimit(path)).notes, notes)
        for unfinished in path.glob(f".*{TEMPORARY}"):
            unfinished.unlink()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing, because `add` has written each batch to the disk."""

    def __len__(self) -> int:
        """Number of batches in the trace."""
        return len(batch_files(self.path))

    def add(
        self, batch: RolloutBatch | Iterable[Rollout], loss_inputs: Mapping[str, Any] | None = None
    ) -> int:
        """Append a batch, and wait until it is on the disk.

        Args:
            batch: the rollouts of one step.
            loss_inputs: further inputs of the loss, by name: numbers, text, dataclasses such as
                `losses.Denominators`, lists of these and mappings of text to these, and arrays or
                tensors. bfloat16 and narrower floats are stored as float32.

        Returns the number of the batch.

        Raises:
            RolloutError: the batch is empty, JSON would change extras, or a loss input is a tensor
                whose numbers cannot be read, such as a sparse one.
            ConfigError: JSON cannot represent a loss input. The message names it.

        After any error, such as a full disk, the trace has the batches that it had before, and add
        can be called again. After an interrupt, `len` of the recorder says whether the batch is in.
        """
        rollouts = check_rollouts(batch, "a batch of a trace")
        batch = batch if isinstance(batch, RolloutBatch) else RolloutBatch(rollouts)
        if loss_inputs is not None and not isinstance(loss_inputs, Mapping):
            raise ConfigError(
                f"loss_inputs is {short(loss_inputs)} of type {type(loss_inputs).__name__}; it "
                'takes a mapping of names to values, such as {"scale": 0.5}.'
            )
        for position, rollout in enumerate(batch):
            check_writable(rollout, position)
        content = encode(batch, *_split(loss_inputs or {}))
        with self._adding:
            index = len(self)
            write_file(self.path / batch_name(index), content)
        return index

    def _begin(self, notes: dict[str, Any] | None) -> None:
        left = sorted(
            entry.name for entry in self.path.iterdir() if not entry.name.endswith(TEMPORARY)
        )
        if left:
            raise TraceError(
                f"{self.path} is not empty: it holds {short(left[0])}. Give an empty or new "
                "folder, or resume=True to continue a trace."
            )
        values = {"kind": KIND, "schema": SCHEMA, "forkpoint": __version__, "notes": notes}
        write_file(self.path / SETTINGS, json.dumps(values, allow_nan=False).encode() + b"\n")

    def _check_notes(self, before: Any, now: Any) -> None:
        if now is not None and before != now:
            raise TraceError(
                f"{self.path} was recorded with the notes {short(before)}, and now they are "
                f"{short(now)}. Record into a new folder."
            )


# Notes and loss inputs as JSON ------------------------------------------------------------


def _split(inputs: Mapping[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """Split loss inputs into arrays, and JSON values."""
    arrays: Arrays = {}
    values: dict[str, Any] = {}
    for name, value in inputs.items():
        if not isinstance(name, str):
            raise ConfigError(f"a loss input is named {short(name)}; give it a name of text.")
        if not (hasattr(value, "__array__") and np.ndim(value)):
            values[name] = _json(value, f"the loss input {name!r}")
            continue
        arrays[name] = np.asarray(host_values("The batch", f"the loss input {name!r}", value))
        dtype = arrays[name].dtype
        if dtype.kind not in "biuf" or dtype.itemsize > MOST_ITEM_BYTES:
            raise ConfigError(
                f"the loss input {name!r} is an array of {dtype}; it takes booleans, whole numbers "
                "and floats of up to 64 bits."
            )
    return arrays, values


def _json(value: Any, what: str) -> Any:
    """Convert a value for JSON: tuples become lists, infinities and NaN become their names."""
    try:
        text = json.dumps(value, default=_plain)
        _check_keys(value)
        return json.loads(text, parse_constant=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{what} is {short(value)}, which JSON cannot represent: {error}. Give numbers, text, "
            "booleans, None, lists of these, and mappings of text to these."
        ) from None


def _check_keys(value: Any) -> None:
    """Raises TypeError for keys that JSON would convert to text, where they may repeat others."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {short(key)} is of type {type(key).__name__}")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _check_keys(item)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__array__") and np.ndim(value) == 0:  # scalars of numpy and torch
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        values = asdict(value)
        _check_keys(values)
        return values
    raise TypeError(f"{short(value)} is of type {type(value).__name__}")
