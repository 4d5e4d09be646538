"""Recording a trace: what a training loop trained on, batch by batch. Imports no torch.

A trace is a folder with a manifest and one safetensors file a batch. A batch's file is written
under another name, flushed to the disk and renamed; then its line is appended to the manifest. So
whenever the writer ends, all batches but the one being added are whole, and a reader beside it sees
whole batches only.
"""

import json
import os
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import ConfigError, TraceError
from forkpoint.rollout_files import check_extras
from forkpoint.rollouts import Rollout, RolloutBatch, short
from forkpoint.traces import manifest, shard
from forkpoint.traces.lock import LOCK, FolderLock

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
        ConfigError: settings that JSON cannot keep.
        TraceError: `path` is being recorded into, holds something already, or with `resume` is no
            trace, has been changed, or was recorded with other settings.
    """
    return Recorder(Path(path), settings_of(model, loss, optimizer, notes), resume=resume)


class Recorder:
    """Writes batches into a trace. Made by `record`."""

    def __init__(self, path: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        self._manifest = path / manifest.MANIFEST
        if path.exists() and not path.is_dir():
            raise TraceError(f"{path} is a file; a trace is a folder. Give another path.")
        path.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(path)
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
            TraceError: the recorder is closed.

        Whatever is raised, by a full disk for one, the trace has the batches that it had before,
        and the same or another batch can be added.
        """
        if self._file.closed:
            raise TraceError(
                f"the recorder of {self.path} is closed. Add batches inside the with block, or go "
                "on with record(path, resume=True)."
            )
        if not isinstance(batch, RolloutBatch):
            batch = RolloutBatch(batch)
        if loss_inputs is not None and not isinstance(loss_inputs, Mapping):
            raise ConfigError(
                f"loss_inputs is {short(loss_inputs)} of type {type(loss_inputs).__name__}; it "
                'takes a mapping of names to values, such as {"scale": 0.5}.'
            )
        for position, rollout in enumerate(batch):
            check_extras(rollout, position)
        arrays, values = _split(loss_inputs or {})
        content = shard.encode(batch, arrays, self._trace, self._batches)
        name = manifest.shard_name(self._batches)
        _write(self.path / name, content)
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
            }
        )
        self._batches += 1
        return self._batches - 1

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
        self._append({**header, **settings})
        _flush_folder(self.path)

    def _go_on(self, settings: dict[str, Any]) -> bool:
        """Open the trace that is there at its end; False where not even its header is whole."""
        last = manifest.last_shard(self.path)
        lines, end = manifest.read_lines(self._manifest, 0, "", 1)
        for entry in self.path.glob(f".batch-*{_TEMPORARY}"):
            entry.unlink()
        if not lines:
            self._manifest.unlink()
            return False
        header = lines[0]
        if header.get("kind") != manifest.KIND:
            raise TraceError(f"{self._manifest} is not that of a trace. Give another folder.")
        for name, value in settings.items():
            if value is None or header.get(name) == value:
                continue
            before: dict[str, Any] = header.get(name) or {}
            keys = [key for key in {**value, **before} if value.get(key) != before.get(key)]
            raise TraceError(
                f"{self.path} was recorded with {name} {short({k: before.get(k) for k in keys})}, "
                f"and now it is {short({k: value.get(k) for k in keys})}. Record into a new folder."
            )
        self._trace, self._previous = header["trace"], lines[-1]["checksum"]
        self._batches = len(lines) - 1
        manifest.check_end(self._manifest, self._batches, last)
        self._file, self._end = self._manifest.open("r+b", buffering=0), end
        self._file.truncate(end)
        self._file.seek(end)
        return True

    def _append(self, values: dict[str, Any]) -> None:
        line = manifest.sealed(values, self._previous)
        content = memoryview(manifest.encode(line))
        try:
            left = content
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except BaseException:
            # After half a line, or one of a batch that was not added, the next would be refused.
            self._file.truncate(self._end)
            self._file.seek(self._end)
            raise
        self._previous, self._end = line["checksum"], self._end + len(content)


def _version() -> str:
    try:
        return version("forkpoint")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def settings_of(model: Any, loss: Any, optimizer: Any, notes: Any) -> dict[str, Any]:
    """What the header says of how the trace was trained, as JSON."""
    # A model has its configuration as .config, and a configuration is made a dict by .to_dict().
    config = getattr(model, "config", model)
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if hasattr(optimizer, "param_groups"):
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        optimizer = {"name": type(optimizer).__name__, "groups": groups}
    if is_dataclass(loss) and not isinstance(loss, type):
        values = {field.name: getattr(loss, field.name) for field in fields(loss)}
        loss = {"name": type(loss).__name__, **values}
    settings = {"model_config": config, "loss": loss, "optimizer": optimizer, "notes": notes}
    kept: dict[str, Any] = {}
    for name, value in settings.items():
        if value is not None and not isinstance(value, Mapping):
            argument = name.removesuffix("_config")
            raise ConfigError(
                f"{argument} is {short(value)} of type {type(value).__name__}, whose settings are "
                "not known. Give them as a mapping."
            )
        kept[name] = _as_json(value, name)
    return kept


def _split(inputs: Mapping[str, Any]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Loss inputs that are arrays, and the others as JSON."""
    arrays: dict[str, NDArray[Any]] = {}
    values: dict[str, Any] = {}
    for name, value in inputs.items():
        if not isinstance(name, str):
            raise ConfigError(f"a loss input is named {short(name)}; names are text.")
        if hasattr(value, "__array__") and np.ndim(value):
            array = _array(value, name)
            if array.dtype.kind not in "biuf":
                raise ConfigError(
                    f"the loss input {name!r} is an array of {array.dtype}; it takes booleans, "
                    "whole numbers and floats."
                )
            arrays[name] = array
        else:
            values[name] = _as_json(value, f"the loss input {name!r}")
    return arrays, values


def _array(value: Any, name: str) -> NDArray[Any]:
    """An array, or the numbers of a tensor, wherever it is and whatever hangs on it."""
    torch = sys.modules.get("torch")  # there is no tensor where it has not been imported
    if torch is not None and isinstance(value, torch.Tensor):
        if value.is_nested or value.layout != torch.strided or value.is_meta:
            raise ConfigError(
                f"the loss input {name!r} is a tensor on {value.device} of the layout "
                f"{'nested' if value.is_nested else value.layout}; it takes dense tensors that "
                "hold numbers. Give value.to_dense(), or a list of numbers."
            )
        value = value.detach().cpu()
        known = (torch.float16, torch.float32, torch.float64)
        if value.dtype.is_floating_point and value.dtype not in known:  # numpy has no others
            value = value.float()
    return np.asarray(value)


def _as_json(value: Any, what: str) -> Any:
    """`value` as JSON gives it back."""
    try:
        return json.loads(json.dumps(value, default=_plain, allow_nan=True), parse_constant=str)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} is {short(value)}, which JSON cannot keep: {error}. Give numbers, text, "
            "booleans, None, lists and mappings of these."
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__array__") and np.ndim(value) == 0:  # numpy's scalars, and torch's
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{short(value)} of type {type(value).__name__}")


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
