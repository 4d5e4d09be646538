"""The manifest of a trace, and reading one, also while it is recorded. Imports no torch.

A trace is a folder of one safetensors file per batch and `manifest.jsonl`. Line 1 of the manifest
holds the settings, every further line the name, size, SHA-256 and counts of one batch file. A line
is appended once its file is on the disk.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkpoint.errors import RolloutError, TraceError
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.rollouts.files import as_path
from forkpoint.rollouts.formats.limits import TIMES_FILE, MemoryLimit
from forkpoint.rollouts.schema import (
    SchemaError,
    mapping,
    one_of,
    or_null,
    parse_json,
    record,
    text,
    text_like,
    whole,
)
from forkpoint.rollouts.traces.batch_file import ARRAYS, decode
from forkpoint.units import MemorySize, size_in_bytes

SCHEMA = 2
MANIFEST = "manifest.jsonl"
KIND = "forkpoint trace"
AGAIN = "Take a copy of the trace as it was recorded."

_SETTINGS = or_null(mapping(lambda value, _: value))
_HEADER = record(
    {
        "kind": one_of(KIND),
        "schema": one_of(SCHEMA),
        "forkpoint": text,
        **dict.fromkeys(("model_config", "loss", "optimizer", "notes"), _SETTINGS),
    }
)
_ENTRY = record(
    {
        "file": text,
        "bytes": whole(1),
        "sha256": text_like("[0-9a-f]{64}", "64 hexadecimal digits"),
        **dict.fromkeys(("rollouts", "tokens"), whole(1)),
        "trained_tokens": whole(),
    }
)


@dataclass(frozen=True, kw_only=True)
class TraceBatch:
    """One recorded batch.

    index: its number in the trace, from 0.
    batch: the rollouts, equal to those that were recorded.
    loss_inputs: the further inputs of the loss, by name: arrays as numpy arrays, other values as
        JSON returns them (a `losses.Denominators` is a dict of its fields).
    """

    index: int
    batch: RolloutBatch
    loss_inputs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TraceEntry:
    """The manifest's line for one batch."""

    index: int
    file: str
    bytes: int
    sha256: str
    rollouts: int
    tokens: int
    trained_tokens: int
    checksum: str
    """SHA-256 of the manifest up to this line: equal for equal traces up to this batch."""


def batch_name(index: int) -> str:
    """The file name of batch `index`."""
    return f"batch-{index:06d}.safetensors"


def open_trace(path: str | os.PathLike[str], *, memory_limit: MemorySize | None = None) -> "Trace":
    """The trace that `forkpoint.record` writes, or wrote, into the folder `path`.

    Args:
        path: the folder.
        memory_limit: the most memory for one batch and for the manifest, as a number of bytes or
            text such as "8GB". None takes 640 MiB, or 16 times what the folder has on disk if that
            is more.

    Raises:
        TraceError: there is no trace, its manifest is damaged, or its schema is another one. Batch
            files are checked when they are read.
        ConfigError: an argument is not allowed.
    """
    folder, limit_bytes = as_path(path, "a trace's folder"), size_in_bytes(memory_limit)
    check_is_trace(folder)
    return Trace(folder, MemoryLimit(folder, limit_bytes))


class Trace:
    """Batches in the order in which they were recorded; made by `open_trace`.

    len(trace), trace[i] and iteration cover the batches that the manifest had when it was opened.
    Each access reads the file of the batch and checks its SHA-256.

    Attributes:
        path: the folder.
        entries: the lines of the manifest.
        forkpoint: the version that recorded it.
        model_config, loss, optimizer, notes: settings, None if none were given. `loss` has its
            class as "name" and its fields; `optimizer` has its class as "name", and "groups".
        fingerprint: SHA-256 of the manifest as read: equal if settings and batches are equal.
        end: the length of the manifest's complete lines, in bytes.
    """

    def __init__(self, path: Path, memory: MemoryLimit) -> None:
        self.path = path
        self.entries: list[TraceEntry] = []
        self.fingerprint: str = ""
        self.end: int = 0
        self._manifest = path / MANIFEST
        self._memory = memory
        check_is_trace(path)
        self._read()
        if not self.fingerprint:
            raise TraceError(f"{self._manifest} has no complete line. {AGAIN}")

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[TraceBatch]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> TraceBatch:
        """Batch `index`, from 0.

        Raises:
            IndexError: there is no such batch.
            TraceError: the file of the batch is missing, or is not what was recorded.
        """
        entry = self.entries[index]
        where = self.path / entry.file
        if not where.is_file():
            raise TraceError(
                f"{where} is missing, and the manifest has it as batch {entry.index}. {AGAIN}"
            )
        self._memory.check(where.stat().st_size, f"batch {entry.index}")
        content = where.read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if found != entry.sha256:
            raise TraceError(
                f"{where} is not what was recorded: it has SHA-256 {found}, and the manifest says "
                f"{entry.sha256}. {AGAIN}"
            )
        try:
            batch, loss_inputs = decode(content, self._memory)
            counts = len(batch), batch.logical_tokens, batch.trained_tokens
            if counts != (entry.rollouts, entry.tokens, entry.trained_tokens):
                raise SchemaError(
                    f"it has {counts[0]} rollouts, {counts[1]} tokens, {counts[2]} trained, and "
                    f"the manifest says {entry.rollouts}, {entry.tokens}, {entry.trained_tokens}"
                )
        except SchemaError as error:
            raise TraceError(
                f"{where} is no batch of a trace: {str(error).rstrip('.')}. {AGAIN}"
            ) from None
        return TraceBatch(index=entry.index, batch=batch, loss_inputs=loss_inputs)

    def _read(self) -> None:
        # Counted first: a recorder at work is one file ahead of its manifest, and no more.
        files = sum(1 for _ in self.path.glob("batch-*.safetensors"))
        self._memory.check(TIMES_FILE * self._manifest.stat().st_size, "the manifest")
        digest = hashlib.sha256()
        # A last line without a line feed is being written, or its writer was killed.
        for line in self._manifest.read_bytes().split(b"\n")[:-1]:
            digest.update(line + b"\n")
            self._take(line, digest.hexdigest())
            self.end, self.fingerprint = self.end + len(line) + 1, digest.hexdigest()
        if files > len(self) + 1:
            raise TraceError(
                f"{self._manifest} lists {len(self)} batches, and the folder has {files}: lines "
                f"are missing at its end. {AGAIN}"
            )

    def _take(self, line: bytes, checksum: str) -> None:
        """Add what a line of the manifest says."""
        index = len(self.entries)
        try:
            if not self.end:
                self._take_header(parse_json(line))
                return
            entry = TraceEntry(index=index, checksum=checksum, **_ENTRY(parse_json(line), ""))
            if entry.file != batch_name(index):
                raise SchemaError(f"file is {short(entry.file)}, not {batch_name(index)}")
        except SchemaError as error:
            number = index + 2 if self.end else 1
            raise TraceError(f"{self._manifest}, line {number}: {error}. {AGAIN}") from None
        self.entries.append(entry)

    def _take_header(self, values: Any) -> None:
        if not isinstance(values, dict) or values.get("kind") != KIND:
            raise SchemaError("this is not the first line of a trace")
        if values.get("schema") != SCHEMA:
            raise TraceError(
                f"{self.path} is a trace of schema {short(values.get('schema'))}, written by "
                f"forkpoint {short(values.get('forkpoint'))}; this forkpoint reads schema {SCHEMA}."
                " Read it with that version, or record again."
            )
        header = _HEADER(values, "")
        self.forkpoint: str = header["forkpoint"]
        self.model_config: Mapping[str, Any] | None = header["model_config"]
        self.loss: Mapping[str, Any] | None = header["loss"]
        self.optimizer: Mapping[str, Any] | None = header["optimizer"]
        self.notes: Mapping[str, Any] | None = header["notes"]


def is_trace(path: Path) -> bool:
    """Whether `path` is a folder with a manifest."""
    return (path / MANIFEST).is_file()


def check_is_trace(path: Path) -> None:
    """Raises TraceError if `path` is not a folder with a manifest."""
    if not is_trace(path):
        raise TraceError(
            f"{path} is no trace: there is no {MANIFEST} in it. Give the folder that was given to "
            "forkpoint.record."
        )


def refuse_part_of_trace(values: Mapping[str, Any], path: Path) -> None:
    """Raises RolloutError if a file's values are those of a manifest or of a batch file."""
    kind = values.get("kind")
    if (isinstance(kind, str) and kind == KIND) or values.keys() >= ARRAYS:
        raise RolloutError(
            f"{path} is a part of a trace, which is read as a whole. Give its folder, "
            f"{path.parent}."
        )
