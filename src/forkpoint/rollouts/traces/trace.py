"""Reading a trace, also while it is being recorded. Imports no torch."""

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkpoint.errors import RolloutError, TraceError
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.rollouts.files import as_path
from forkpoint.rollouts.formats.limits import MemoryLimit, tree_bytes
from forkpoint.rollouts.traces import manifest, shard
from forkpoint.units import MemorySize, size_in_bytes

_log = logging.getLogger("forkpoint")


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
    """Entry of the manifest for one batch."""

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


def open_trace(path: str | os.PathLike[str], *, memory_limit: MemorySize | None = None) -> "Trace":
    """The trace that `forkpoint.record` writes, or wrote, into the folder `path`.

    Lines of its manifest that do not follow those before them, which two writers leave, are left
    out with all after them: `Trace.broken` says so, and a warning is logged.

    Args:
        path: the folder.
        memory_limit: the most memory for one batch and for what is kept of the manifest, as a
            number of bytes or text such as "8GB". None takes 640 MiB, or 16 times what the folder
            has on disk where that is more.

    Raises TraceError where there is no trace, or no line that can be read, where its manifest has
    been changed, and where it was written by a newer schema; ConfigError for arguments that are not
    allowed. Shards are checked when they are read.
    """
    folder, limit_bytes = as_path(path, "a trace's folder"), size_in_bytes(memory_limit)
    _check_is_trace(folder)
    return Trace(folder, MemoryLimit(folder, limit_bytes))


class Trace:
    """Batches in the order in which they were recorded; made by `open_trace`.

    len(trace), trace[i], and iteration are over the whole batches that the manifest had when it was
    last read; `refresh` reads on. Each access reads the batch's file and checks it.
    """

    def __init__(self, path: Path, memory: MemoryLimit) -> None:
        self.path = path
        self._manifest = path / manifest.MANIFEST
        self._memory = memory
        _check_is_trace(path)
        self.entries: list[TraceEntry] = []
        self.broken: str | None = None
        """Batches that are left out, and why: lines of the manifest that do not follow those before
        them, and batches whose files a second writer replaced. None where nothing is."""
        self._end = 0
        last = manifest.last_shard(path)
        lines = manifest.Lines(self._manifest, memory)
        header = None
        for line in lines:
            if header is None:
                header = line
                self._checksum: str = line["checksum"]
            else:
                self._take(line)
        if header is None:
            raise TraceError(
                f"{self._manifest} has no whole line: recording had not begun, or the file is cut "
                "short. Wait for the recorder, or record again."
            )
        self._header = header
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
        self._finish(lines, last)

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
        batch, arrays, about = self._decoded(where, entry)
        if (about["trace"], about["batch"]) != (self.trace_id, entry.index):
            raise TraceError(
                f"{where} is batch {short(about['batch'])} of trace {short(about['trace'])}, and "
                f"here belongs batch {entry.index} of {self.trace_id}. Take a copy of the whole "
                "folder."
            )
        found = (len(batch), batch.logical_tokens, batch.trained_tokens)
        if found != (entry.rollouts, entry.tokens, entry.trained_tokens):
            raise TraceError(
                f"{where} has {found[0]} rollouts with {found[1]} tokens, of which {found[2]} are "
                f"trained, and the manifest says {entry.rollouts}, {entry.tokens} and "
                f"{entry.trained_tokens}. {manifest.AGAIN}"
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
        return self.broken is None and self._manifest.stat().st_size > self._end

    def refresh(self) -> int:
        """Read what was recorded since, and say how many batches that is.

        Raises TraceError where the manifest has been changed, also in what was read before.
        """
        known = len(self.entries)
        last = manifest.last_shard(self.path)
        lines = manifest.Lines(self._manifest, self._memory)
        same = False
        for number, line in enumerate(lines, start=-1):  # that of the header is -1
            if number == known - 1:
                same = line["checksum"] == self._checksum
                if not same:
                    break
            elif number >= known:
                self._take(line)
        if not same:
            raise TraceError(
                f"{self._manifest} is no longer the one that was opened. Open the trace again."
            )
        self._finish(lines, last)
        return len(self.entries) - known

    def verify(self) -> None:
        """Read every batch. Raises TraceError where one is not what was recorded, and where lines
        are left out."""
        if self.broken is not None:
            raise TraceError(self.broken)
        for _ in self:
            pass

    def _take(self, line: manifest.Line) -> None:
        self._memory.hold(tree_bytes(line, self._memory.left_bytes), "the manifest")
        names = ("file", "bytes", "sha256", "rollouts", "tokens", "trained_tokens")
        values = {name: line[name] for name in (*names, "loss_inputs", "checksum")}
        self.entries.append(TraceEntry(index=len(self.entries), **values))
        self._checksum = line["checksum"]

    def _finish(self, lines: manifest.Lines, last: int) -> None:
        """Take note of how the manifest ends."""
        self._end = lines.end
        broken = lines.broken
        if broken is None:
            self.broken = None
            manifest.check_end(self._manifest, len(self), last)
            return
        # A second writer replaced the files of the batches that it wrote lines for.
        first = min((n for n in broken.batches if n >= 0), default=len(self))
        whole = first
        while whole < len(self) and self._is_as_recorded(self.entries[whole]):
            whole += 1
        replaced = len(self) - whole if first < len(self) else 0
        if replaced:
            del self.entries[whole:]
            self._checksum = self.entries[-1].checksum if whole else self._header["checksum"]
        if not self.entries:
            raise TraceError(broken.reason)
        files = ""
        if replaced:
            files = f" The files of {_count(replaced, 'batch', 'batches')} before it were replaced."
        self.broken = (
            f"{broken.reason}{files} The {_count(len(self), 'batch', 'batches')} before are read, "
            f"and {_count(broken.lines, 'line', 'lines')} from it on left out. Two recorders may "
            "have written, as after a fork."
        )
        _log.warning("%s", self.broken)

    def _is_as_recorded(self, entry: TraceEntry) -> bool:
        path = self.path / entry.file
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != entry.bytes:
                    return False
                return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
        except FileNotFoundError:
            return False

    def _decoded(
        self, where: Path, entry: TraceEntry
    ) -> tuple[RolloutBatch, shard.Arrays, Mapping[str, Any]]:
        """Contents of a batch's file, as they were recorded."""
        try:
            with where.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry.bytes:
                    raise TraceError(
                        f"{where} is not what was recorded: it has {size} bytes, and the manifest "
                        f"says {entry.bytes}. {manifest.AGAIN}"
                    )
                needed = shard.bytes_of(entry.bytes, entry.rollouts, entry.tokens)
                self._memory.check(needed, f"batch {entry.index}")
                content = file.read()
                found = manifest.sha256(content)
                if found != entry.sha256:
                    raise TraceError(
                        f"{where} is not what was recorded: it has SHA-256 {found}, and the "
                        f"manifest says {entry.sha256}. {manifest.AGAIN}"
                    )
                return shard.decode(content, str(where), self._memory)
        except FileNotFoundError:
            raise TraceError(
                f"{where} is missing, and the manifest has it as batch {entry.index}. Take a copy "
                "of the whole folder."
            ) from None


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def is_trace(path: Path) -> bool:
    """Whether `path` is a folder with a manifest."""
    return (path / manifest.MANIFEST).is_file()


def _check_is_trace(path: Path) -> None:
    if not is_trace(path):
        raise TraceError(
            f"{path} is no trace: there is no {manifest.MANIFEST} in it. Give the folder that "
            "was given to forkpoint.record."
        )


def refuse_part_of_trace(values: Mapping[str, Any], path: Path) -> None:
    """Raises RolloutError where a file's values are those of a manifest or of a shard."""
    kind = values.get("kind")
    if (isinstance(kind, str) and kind == manifest.KIND) or values.keys() >= shard.ARRAYS:
        raise RolloutError(
            f"{path} is a part of a trace, which is read as a whole. Give its folder, "
            f"{path.parent}."
        )
