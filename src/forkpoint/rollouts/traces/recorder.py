"""Recording a trace: what a training loop trained on, batch by batch. Imports no torch.

A trace is a folder with a manifest and one safetensors file a batch. A batch's file is written
under another name, flushed to the disk and renamed; then its line is appended to the manifest. So
whenever the writer ends, all batches but the one being added are whole, and a reader beside it sees
whole batches only.
"""

import os
import secrets
import threading
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

from forkpoint.errors import ConfigError, RolloutError, TraceError
from forkpoint.rollouts.batch import Rollout, RolloutBatch, short
from forkpoint.rollouts.files import as_path, check_extras
from forkpoint.rollouts.formats.limits import MemoryLimit
from forkpoint.rollouts.traces import manifest, shard
from forkpoint.rollouts.traces.kept import settings_of, split_inputs
from forkpoint.rollouts.traces.lock import LOCK, FolderLock

_TEMPORARY = ".tmp"


def record(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    loss: Any = None,
    optimizer: Any = None,
    notes: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> "Recorder":
    """Record a trace into the folder `path`: `with record(path) as t: t.add(batch, loss_inputs)`.

    Args:
        path: a folder that does not exist or is empty. It is made.
        model: a transformers model, its configuration, or a mapping of settings: what the trace
            was trained with, kept as JSON.
        loss: one of `forkpoint.losses`, any other dataclass, or a mapping.
        optimizer: a torch optimizer, of which the settings are kept, or a mapping.
        notes: anything else of worth, as JSON has it.
        resume: go on with the trace in `path`, after the last of its whole batches; then model,
            loss, optimizer and notes must be those of the beginning, or None. Without a trace in
            `path` one is begun.

    Until it is closed, or its process ends, nothing else can record into the folder; reading it is
    always possible.

    Raises:
        ConfigError: settings that JSON cannot keep, or a path that is none.
        TraceError: `path` is being recorded into, holds something already, or with `resume` is no
            trace, has been changed, or was recorded with other settings.
    """
    settings = settings_of(model, loss, optimizer, notes)
    return Recorder(as_path(path, "a folder"), settings, resume=resume)


class Recorder:
    """Writes batches into a trace. Made by `record`."""

    def __init__(self, path: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        self._manifest = path / manifest.MANIFEST
        if path.exists() and not path.is_dir():
            raise TraceError(f"{path} is a file; a trace is a folder. Give another path.")
        path.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(path)
        # Reentrant: an interrupt between the block and its end leaves it with this thread.
        self._adding = threading.RLock()
        holder = self._lock.take()
        if holder is not None:
            raise TraceError(
                f"{path} is being recorded into by {holder}; a trace has one recorder at a time. "
                "Close that one or end its process, or record into another folder."
            )
        try:
            self._open(settings, resume=resume)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """How many whole batches the trace has."""
        return self._batches

    def close(self) -> None:
        """End recording; the trace can be resumed. Closing again does nothing."""
        self._file.close()
        self._lock.release()

    def add(
        self,
        batch: RolloutBatch | Iterable[Rollout],
        loss_inputs: Mapping[str, Any] | None = None,
    ) -> int:
        """Append a batch; when this returns it is on the disk.

        Args:
            batch: what one step was trained on.
            loss_inputs: what the loss was given besides, by name: numbers, text, dataclasses such
                as `losses.Denominators`, mappings and lists of these, and arrays or tensors, which
                are kept as numbers: bfloat16 and narrower as float32.

        Returns the batch's number.

        Raises:
            RolloutError: no rollouts, or extras that JSON cannot give back.
            ConfigError: a loss input that cannot be kept, named.
            TraceError: the recorder is closed; it was opened by another process, of which this one
                was forked; or another recorder has written into the folder, or holds it.

        Whatever is raised, by a full disk for one, the trace has the batches that it had before,
        and the same or another batch can be added. An interrupt may also come when the batch is in:
        `len` of the recorder says so.
        """
        if self._file.closed:
            raise TraceError(
                f"the recorder of {self.path} is closed. Add batches inside the with block, or go "
                "on with record(path, resume=True)."
            )
        self._check_process()
        with self._adding:  # by one thread at a time
            return self._add(batch, loss_inputs)

    def _add(
        self, batch: RolloutBatch | Iterable[Rollout], loss_inputs: Mapping[str, Any] | None
    ) -> int:
        self._check_alone()
        if not isinstance(batch, RolloutBatch):
            batch = RolloutBatch(batch)
        if not len(batch):
            raise RolloutError("There are no rollouts; a batch of a trace takes at least one.")
        if loss_inputs is not None and not isinstance(loss_inputs, Mapping):
            raise ConfigError(
                f"loss_inputs is {short(loss_inputs)} of type {type(loss_inputs).__name__}; it "
                'takes a mapping of names to values, such as {"scale": 0.5}.'
            )
        for position, rollout in enumerate(batch):
            check_extras(rollout, position)
        arrays, values = split_inputs(loss_inputs or {})
        content = shard.encode(batch, arrays, self._trace, self._batches)
        name = manifest.shard_name(self._batches)
        _write(self.path / name, content)
        self._check_alone()
        self._append(
            {
                "batch": self._batches,
                "file": name,
                "bytes": len(content),
                "sha256": manifest.sha256(content),
                "rollouts": len(batch),
                "tokens": batch.logical_tokens,
                "trained_tokens": batch.trained_tokens,
                "loss_inputs": values,
            },
            self._batches + 1,
        )
        return self._batches - 1

    def _check_process(self) -> None:
        """Raises TraceError in a process that was forked from the one that records."""
        if os.getpid() != self._lock.owner:
            raise TraceError(
                f"the recorder of {self.path} belongs to process {self._lock.owner}, and this one "
                "was forked from it; a trace has one recorder at a time. Add batches in the "
                "process that called record, or record into a folder of its own."
            )

    def _check_alone(self) -> None:
        """Whether nobody else holds the folder, and its manifest ends where this recorder left it.

        Raises TraceError where it is not so.
        """
        try:
            holder = self._lock.keep()
            found = self._manifest.stat()
        except FileNotFoundError:
            raise TraceError(
                f"{self.path} is no longer there, or its manifest is not. Record into a new folder."
            ) from None
        if holder is not None:
            raise TraceError(
                f"the lock of {self.path} was removed, and {holder} has taken it since; a trace "
                "has one recorder at a time. Go on with that one; this one adds nothing more."
            )
        here = os.fstat(self._file.fileno())
        if not os.path.samestat(found, here) or here.st_size != self._end:
            raise TraceError(
                f"{self._manifest} has {found.st_size} bytes, and this recorder left it with "
                f"{self._end}: something else has written it. Go on with record(path, "
                "resume=True), which reads what is there."
            )

    def _open(self, settings: dict[str, Any], *, resume: bool) -> None:
        if resume and self._manifest.exists() and self._go_on(settings):
            return
        names = sorted(entry.name for entry in self.path.iterdir() if entry.name != LOCK)
        left = [name for name in names if not (resume and _is_unfinished(name))]
        if left:
            raise TraceError(
                f"{self.path} is not empty: it holds {short(left[0])}. Give an empty or new "
                "folder, or resume=True to go on with a trace."
            )
        self._begin({**settings, "trace": secrets.token_hex(16)})

    def _begin(self, settings: dict[str, Any]) -> None:
        self._trace, self._previous, self._batches = settings["trace"], "", 0
        self._file, self._end = self._manifest.open("ab", buffering=0), 0
        header = {"kind": manifest.KIND, "schema": manifest.SCHEMA, "forkpoint": _version()}
        self._append({**header, **settings}, 0)
        _flush_folder(self.path)

    def _go_on(self, settings: dict[str, Any]) -> bool:
        """Open the trace that is there at its end; False where not even its header is whole."""
        last = manifest.last_shard(self.path)
        lines = manifest.Lines(self._manifest, MemoryLimit(self.path))
        header, previous, count = None, "", 0
        for line in lines:
            header, previous, count = header or line, line["checksum"], count + 1
        if lines.broken is not None:
            raise TraceError(
                f"{lines.broken.reason} The batches before it can be read (open_trace), and none "
                "can be added. Record into a new folder."
            )
        for entry in self.path.glob(f".batch-*{_TEMPORARY}"):
            entry.unlink()
        if header is None:
            self._manifest.unlink()
            return False
        for name, value in settings.items():
            if value is None or header.get(name) == value:
                continue
            before: dict[str, Any] = header.get(name) or {}
            keys = [key for key in {**value, **before} if value.get(key) != before.get(key)]
            raise TraceError(
                f"{self.path} was recorded with {name} {short({k: before.get(k) for k in keys})}, "
                f"and now it is {short({k: value.get(k) for k in keys})}. Record into a new folder."
            )
        self._trace, self._previous, self._batches = header["trace"], previous, count - 1
        manifest.check_end(self._manifest, self._batches, last)
        self._file, self._end = self._manifest.open("r+b", buffering=0), lines.end
        self._file.truncate(self._end)
        self._file.seek(self._end)
        return True

    def _append(self, values: dict[str, Any], batches: int) -> None:
        """Write a line, after which the trace has so many batches."""
        line = manifest.sealed(values, self._previous)
        content = memoryview(manifest.encode(line))
        before = self._previous, self._end, self._batches
        after = line["checksum"], self._end + len(content), batches
        try:
            left = content
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
            # An interrupt may come between any two lines: either both know of the batch, the
            # manifest and this object, or neither does.
            self._previous, self._end, self._batches = after
        except BaseException:
            # After half a line, or one of a batch that was not added, the next would be refused.
            self._previous, self._end, self._batches = before
            self._file.truncate(self._end)
            self._file.seek(self._end)
            raise


def _version() -> str:
    try:
        return version("forkpoint")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def _write(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def _flush_folder(path: Path) -> None:
    """Flush the names in a folder, where folders can be opened."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_unfinished(name: str) -> bool:
    """Whether a file is what a recorder leaves that was ended while it wrote the header."""
    return name.endswith(_TEMPORARY)
