"""Reading a trace, also while it is being recorded. Imports no torch."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkpoint.errors import RolloutError, TraceError
from forkpoint.rollout_files import as_path
from forkpoint.rollouts import RolloutBatch, short
from forkpoint.traces import manifest, shard


@dataclass(frozen=True, kw_only=True)
class TraceBatch:
    """One recorded batch.

    index: its number in the trace, from 0.
    batch: the rollouts, equal to those that were recorded.
    loss_inputs: what the loss was given besides, by name: arrays as numpy arrays, other things as
        JSON gives them back (a `losses.Denominators` is a dict of its fields).
    """

    index: int
    batch: RolloutBatch
    loss_inputs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TraceEntry:
    """What the manifest says of one batch."""

    index: int
    file: str
    bytes: int
    sha256: str
    rollouts: int
    tokens: int
    trained_tokens: int
    loss_inputs: Mapping[str, Any]
    """Those that are no arrays."""
    checksum: str
    """Of the manifest up to this batch: equal for equal traces up to here."""


def open_trace(path: str | os.PathLike[str]) -> "Trace":
    """The trace that `forkpoint.record` writes, or wrote, into the folder `path`.

    Raises TraceError where there is none, where its manifest has been changed, and where it was
    written by a newer schema; ConfigError for what is no path. Shards are checked when they are
    read.
    """
    return Trace(as_path(path, "a trace's folder"))


class Trace:
    """Batches in the order in which they were recorded; made by `open_trace`.

    len(trace), trace[i], and iteration are over the whole batches that the manifest had when it was
    last read; `refresh` reads on. Each access reads the batch's file and checks it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = path / manifest.MANIFEST
        if not is_trace(path):
            raise TraceError(
                f"{path} is no trace: there is no {manifest.MANIFEST} in it. Give the folder that "
                "was given to forkpoint.record."
            )
        last = manifest.last_shard(path)
        lines, self._end = manifest.read_lines(self._manifest, 0, "", 1)
        if not lines:
            raise TraceError(
                f"{self._manifest} has no whole line: recording had not begun, or the file is cut "
                "short. Wait for the recorder, or record again."
            )
        header = lines[0]
        if header.get("kind") != manifest.KIND or header.get("schema") != manifest.SCHEMA:
            raise TraceError(
                f"{self._manifest}, line 1 is {short(header)}, not the header of a trace. Give the "
                "folder that was given to forkpoint.record."
            )
        self.trace_id: str = header["trace"]
        """Drawn at random when recording began; every shard carries it."""
        self.forkpoint: str = header["forkpoint"]
        """The version that recorded it."""
        self.model_config: Mapping[str, Any] | None = header["model_config"]
        self.loss: Mapping[str, Any] | None = header["loss"]
        """Its class as `name`, and its fields."""
        self.optimizer: Mapping[str, Any] | None = header["optimizer"]
        """Its class as `name`, and the settings of its parameter `groups`."""
        self.notes: Mapping[str, Any] | None = header["notes"]
        self.entries: list[TraceEntry] = []
        self._checksum: str = header["checksum"]
        self._take(lines[1:])
        manifest.check_end(self._manifest, len(self), last)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[TraceBatch]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> TraceBatch:
        """Batch `index`, from 0.

        Raises IndexError outside the trace, and TraceError, naming the file, where the batch is
        missing, is not what was recorded, or is that of another trace.
        """
        entry = self.entries[index]
        where = self.path / entry.file
        try:
            content = where.read_bytes()
        except FileNotFoundError:
            raise TraceError(
                f"{where} is missing, and the manifest has it as batch {entry.index}. Take a copy "
                "of the whole folder."
            ) from None
        found = manifest.sha256(content)
        if found != entry.sha256:
            raise TraceError(
                f"{where} is not what was recorded: it has {len(content)} bytes with SHA-256 "
                f"{found}, and the manifest says {entry.bytes} bytes with {entry.sha256}. Take a "
                "copy of the trace as it was recorded."
            )
        batch, arrays, about = shard.decode(content, str(where))
        if (about["trace"], about["batch"]) != (self.trace_id, entry.index):
            raise TraceError(
                f"{where} is batch {short(about['batch'])} of trace {short(about['trace'])}, and "
                f"here belongs batch {entry.index} of {self.trace_id}. Take a copy of the whole "
                "folder."
            )
        return TraceBatch(
            index=entry.index, batch=batch, loss_inputs={**entry.loss_inputs, **arrays}
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the manifest as read: equal where header and batches are equal."""
        return self._checksum

    @property
    def unfinished(self) -> bool:
        """Whether the manifest ends in a line that is not whole: its writer is in it, or ended."""
        return self._manifest.stat().st_size > self._end

    def refresh(self) -> int:
        """Read what was recorded since, and say how many batches that is.

        Raises TraceError where the manifest has been changed, also in what was read before.
        """
        known = len(self.entries)
        last = manifest.last_shard(self.path)
        lines, end = manifest.read_lines(self._manifest, 0, "", 1)
        sums = [line["checksum"] for line in lines]
        if self._checksum not in sums[known : known + 1]:
            raise TraceError(
                f"{self._manifest} is no longer the one that was opened. Open the trace again."
            )
        self._end = end
        self._take(lines[known + 1 :])
        manifest.check_end(self._manifest, len(self), last)
        return len(self.entries) - known

    def verify(self) -> None:
        """Read every batch. Raises TraceError where one is not what was recorded."""
        for _ in self:
            pass

    def _take(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            index = len(self.entries)
            if line.get("batch") != index or line.get("file") != manifest.shard_name(index):
                raise TraceError(
                    f"{self._manifest}, line {index + 2} is of batch {short(line.get('batch'))} in "
                    f"{short(line.get('file'))}; here belongs batch {index}. Take a copy of the "
                    "trace as it was recorded."
                )
            names = ("file", "bytes", "sha256", "rollouts", "tokens", "trained_tokens")
            values = {name: line[name] for name in (*names, "loss_inputs", "checksum")}
            self.entries.append(TraceEntry(index=index, **values))
            self._checksum = line["checksum"]


def is_trace(path: Path) -> bool:
    """Whether `path` is a folder with a manifest."""
    return (path / manifest.MANIFEST).is_file()


def refuse_part_of_trace(values: Mapping[str, Any], path: Path) -> None:
    """Raises RolloutError where a file's values are those of a manifest or of a shard."""
    if values.get("kind") == manifest.KIND or values.keys() >= shard.ARRAYS:
        raise RolloutError(
            f"{path} is a part of a trace, which is read as a whole. Give its folder, "
            f"{path.parent}."
        )
