"""Reader of traces, also while they are recorded. Imports no torch.

A trace is a folder with `trace.json`, which has the settings, and one safetensors file for each
batch. Each file is complete or absent.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkpoint.errors import RolloutError, TraceError
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.rollouts.files import as_path
from forkpoint.rollouts.formats.limits import TIMES_FILE, MemoryLimit
from forkpoint.rollouts.schema import SchemaError, parse_json, read
from forkpoint.rollouts.traces.batch_file import ARRAYS, decode
from forkpoint.units import MemorySize, size_in_bytes

SCHEMA = 4
SETTINGS = "trace.json"
KIND = "forkpoint trace"
AGAIN = "Restore the trace from a copy."


@dataclass(frozen=True, kw_only=True)
class _Header:
    kind: str
    schema: int
    forkpoint: str
    notes: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class TraceBatch:
    """One recorded batch.

    index: index of the batch in the trace, from 0.
    batch: the rollouts, equal to those that were recorded.
    loss_inputs: the further inputs of the loss, by name: arrays as numpy arrays, other values as
        JSON returns them (a `losses.Denominators` is a dict of its fields).
    """

    index: int
    batch: RolloutBatch
    loss_inputs: Mapping[str, Any]


def batch_name(index: int) -> str:
    """Name of the file of batch `index`."""
    return f"batch-{index:06d}.safetensors"


def open_trace(path: str | os.PathLike[str], *, memory_limit: MemorySize | None = None) -> "Trace":
    """Open a trace that `forkpoint.record` has written, or is still writing.

    Args:
        path: the folder.
        memory_limit: limit on memory for one batch, in bytes or as text such as "8GB". None means
            640 MiB, or 16 times the size of the folder on disk if that is more.

    Raises:
        TraceError: the folder is not a trace, a batch is missing, or the schema is not supported.
            Batch files are checked when they are read.
        ConfigError: an argument is not allowed.
    """
    folder, limit_bytes = as_path(path, "a trace's folder"), size_in_bytes(memory_limit)
    check_is_trace(folder)
    return Trace(folder, MemoryLimit(folder, limit_bytes))


class Trace:
    """Batches in the order in which they were recorded; made by `open_trace`.

    len(trace), trace[i] and iteration cover the batches that there were when it was opened. Each
    access reads the file of the batch.

    Attributes:
        path: the folder.
        files: paths of the files of the batches.
        forkpoint: version of forkpoint that recorded the trace.
        notes: the notes of the recorder; None if it was given none.
    """

    def __init__(self, path: Path, memory: MemoryLimit) -> None:
        self.path = path
        self._memory = memory
        check_is_trace(path)
        self._read_settings()
        self.files: list[Path] = batch_files(path)
        for index, file in enumerate(self.files):
            if file.name != batch_name(index):
                raise TraceError(f"{path} has {file.name} and no {batch_name(index)}. {AGAIN}")

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[TraceBatch]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> TraceBatch:
        """Batch `index`, from 0.

        Raises:
            IndexError: there is no such batch.
            TraceError: the file of the batch is missing or has changed.
        """
        where = self.files[index]
        if not where.is_file():
            raise TraceError(f"{where} is missing. {AGAIN}")
        memory = copy(self._memory)  # media are charged to this batch alone
        memory.check(where.stat().st_size, f"batch {index}")
        try:
            batch, loss_inputs = decode(where.read_bytes(), memory)
        except SchemaError as error:
            raise TraceError(
                f"{where} is not a batch of a trace: {str(error).rstrip('.')}. {AGAIN}"
            ) from None
        return TraceBatch(index=range(len(self))[index], batch=batch, loss_inputs=loss_inputs)

    def digest(self, count: int) -> str:
        """SHA-256 of the files of the first batches, equal for equal batches."""
        digest = hashlib.sha256()
        for file in self.files[:count]:
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        return digest.hexdigest()

    def _read_settings(self) -> None:
        path = self.path / SETTINGS
        self._memory.check(TIMES_FILE * path.stat().st_size, SETTINGS)
        try:
            values = parse_json(path.read_bytes())
            if not isinstance(values, dict) or values.get("kind") != KIND:
                raise SchemaError("it does not have the settings of a trace")
            if values.get("schema") != SCHEMA:
                raise TraceError(
                    f"{self.path} is a trace of schema {short(values.get('schema'))}, written by "
                    f"forkpoint {short(values.get('forkpoint'))}; this forkpoint reads schema "
                    f"{SCHEMA}. Read it with that version, or record again."
                )
            header = read(_Header, values, "")
        except SchemaError as error:
            raise TraceError(f"{path}: {error}. {AGAIN}") from None
        self.forkpoint: str = header.forkpoint
        self.notes: Mapping[str, Any] | None = header.notes


def batch_files(path: Path) -> list[Path]:
    """Files of batches in a folder, by number."""
    return sorted(path.glob("batch-*.safetensors"))


def is_trace(path: Path) -> bool:
    """Whether `path` is a folder with the settings of a trace."""
    return (path / SETTINGS).is_file()


def check_is_trace(path: Path) -> None:
    """Raises TraceError if `path` is not the folder of a trace."""
    if not is_trace(path):
        raise TraceError(
            f"{path} is not a trace: it has no {SETTINGS}. Give the folder that "
            "forkpoint.record wrote."
        )


def refuse_part_of_trace(values: Mapping[str, Any], path: Path) -> None:
    """Raises RolloutError if a file is a part of a trace, from its values."""
    kind = values.get("kind")
    if (isinstance(kind, str) and kind == KIND) or values.keys() >= ARRAYS:
        raise RolloutError(
            f"{path} is a part of a trace, which is read as a whole. Give its folder, "
            f"{path.parent}."
        )
