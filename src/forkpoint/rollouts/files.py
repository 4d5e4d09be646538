"""Writes files of rollouts in forkpoint's format, JSON lines. Imports no torch.

Each line has one JSON object, whose keys are the fields of `Rollout`. token_ids, loss_mask and
advantage are required. Blank lines between objects are allowed. Inputs of media are in a second
file in the same folder (`media_entries.py`).
"""

import gzip
import importlib
import json
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors
import safetensors.numpy

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.rollouts.batch import Rollout, check_rollouts, short
from forkpoint.rollouts.disk import pixels_path, replacing, write_file
from forkpoint.rollouts.media_entries import Arrays, entry_of

_FIELDS = tuple(field.name for field in fields(Rollout))
REQUIRED = ("token_ids", "loss_mask", "advantage")
_SUFFIXES = (".jsonl", ".gz", ".zst")


def as_path(path: str | os.PathLike[str], of: str) -> Path:
    """Return the path as a pathlib.Path. Raises ConfigError if it is of another type."""
    try:
        return Path(path)
    except TypeError:
        raise ConfigError(
            f"path is {short(path)} of type {type(path).__name__}; it takes the path of {of}, as "
            "text or a pathlib.Path."
        ) from None


def import_extra(package: str, extra: str, what: str) -> Any:
    """Import a package of an extra. `what`: the feature that needs it.

    Raises ConfigError, with the command that installs the extra, if the package is missing.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"{what} takes {package}, which is not installed. Install it: pip install "
            f"'forkpoint[{extra}]'."
        ) from None


def save_rollouts(path: str | os.PathLike[str], rollouts: Iterable[Rollout]) -> None:
    """Write rollouts, one JSON object per line. `load_rollouts` reads equal rollouts.

    Rollouts of a batch without advantages have advantage 0 in the file; `record` keeps this fact.

    The suffix selects the format: .jsonl plain, .gz gzip, .zst zstd. A file at `path` is replaced
    after all rollouts are written; after an error it is unchanged. Inputs of images and videos are
    written once each into a second file, `path` with ".media.safetensors" added; if there are none,
    such a file is removed. A process that is killed leaves the old rollouts or the new ones, with
    their inputs.

    Raises:
        RolloutError: the suffix is not known, the folder does not exist, the path is a directory,
            there are no rollouts, an item is not a Rollout, a rollout_id appears twice, media have
            no pixels or inputs that are not numbers, or JSON would change extras.
        ConfigError: the path has another type.
    """
    path = as_path(path, "a file")
    if path.suffix not in _SUFFIXES:
        raise RolloutError(
            f"{path} ends in {path.suffix!r}; allowed are {', '.join(_SUFFIXES)}. Rename the file."
        )
    if not path.parent.is_dir():
        raise RolloutError(f"The folder {path.parent} does not exist. Create it before saving.")
    if path.is_dir():
        raise RolloutError(f"{path} is a directory. Give the path of a file to write.")
    rollouts = check_rollouts(rollouts, "a file")
    arrays: Arrays = {}
    pixels = pixels_path(path)
    replaced: Arrays = {}
    with replacing(path) as file:
        with _writer(file, path.suffix) as writer:
            for position, rollout in enumerate(rollouts):
                writer.write(_line(rollout, position, arrays))
        if arrays:
            # Names contain the SHA-256 of a medium, so one file can have the inputs for the old and
            # the new lines.
            replaced = {n: x for n, x in _arrays_of(pixels).items() if n not in arrays}
            write_file(pixels, encode_arrays(replaced | arrays))
    if not arrays:
        pixels.unlink(missing_ok=True)  # the inputs of the old lines
    elif replaced:
        write_file(pixels, encode_arrays(arrays))


def rollout_of(record: dict[str, Any]) -> Rollout:
    """Make a rollout from a record. Unknown keys go into its extras.

    Raises RolloutError if a required key is missing or a value is not allowed.
    """
    if missing := [field for field in REQUIRED if field not in record]:
        raise RolloutError(
            f"has no {', '.join(missing)}; its keys are {short(list(record))}. A rollout "
            f"needs {', '.join(REQUIRED)}; rename the keys or add them."
        )
    known = {key: value for key, value in record.items() if key in _FIELDS}
    unknown = {key: value for key, value in record.items() if key not in _FIELDS}
    extras = {} if known.get("extras") is None else known["extras"]
    if unknown and isinstance(extras, dict):  # Rollout refuses other types
        if twice := unknown.keys() & extras.keys():
            raise RolloutError(
                f"{short(min(twice))} is a key of the line and of its extras. Unknown keys of a "
                "line are put into extras; rename or remove one of the two."
            )
        known["extras"] = unknown | extras
    return Rollout(**known)


def _writer(file: BinaryIO, suffix: str) -> AbstractContextManager[Any]:
    """Writer that compresses into `file`. Its exit ends the stream, and `file` stays open."""
    if suffix == ".gz":  # no name and no time, so that equal rollouts give equal files
        return gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0)
    if suffix == ".zst":
        zstandard = import_extra("zstandard", "zstd", "a file that ends in .zst")
        return zstandard.ZstdCompressor(write_checksum=True).stream_writer(file, closefd=False)
    return nullcontext(file)


def _arrays_of(path: Path) -> Arrays:
    """Arrays of a file of pixels; none if the file does not exist or cannot be read."""
    try:
        return safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError, KeyError):  # KeyError: a dtype that numpy lacks
        return {}


def encode_arrays(arrays: Arrays) -> bytes:
    """Encode arrays as the content of a safetensors file."""
    # safetensors writes the memory of a view, not its elements.
    return safetensors.numpy.save(
        {name: np.ascontiguousarray(x).reshape(x.shape) for name, x in arrays.items()}
    )


def _line(rollout: Rollout, position: int, arrays: Arrays) -> bytes:
    record: dict[str, Any] = {}
    for name in ("group_id", "rollout_id", *_FIELDS):  # names come first, for human readers
        value: Any = getattr(rollout, name)
        if name == "loss_mask":
            value = value.astype(int)  # 0 and 1 take a third of the bytes of false and true
        if name == "media":
            value = media_entries(rollout, position, arrays)
        if value is not None:
            record[name] = value.tolist() if hasattr(value, "tolist") else value
    check_writable(rollout, position)
    line = json.dumps(record, allow_nan=False, separators=(",", ":"))
    return line.encode() + b"\n"


def media_entries(rollout: Rollout, position: int, arrays: Arrays) -> Any:
    """Entries of a rollout's media; None without media. Their arrays are added to `arrays`."""
    where = _named(rollout, position)
    return [entry_of(medium, arrays, where) for medium in rollout.media] or None


def check_writable(rollout: Rollout, position: int) -> None:
    """Raises RolloutError, naming the rollout, for extras that JSON would change.

    `position`: position of the rollout among those to write.
    """
    try:
        text = json.dumps(rollout.extras, allow_nan=False)
        same = json.loads(text) == rollout.extras
    except (TypeError, ValueError, RecursionError) as error:
        reason = str(error).partition(": ")[0]  # Python 3.12 and later append the value
        raise RolloutError(
            f"{_named(rollout, position)}: extras {short(rollout.extras)} cannot be written as "
            f"JSON: {reason}. Keep only text, finite numbers, booleans, None, lists and dicts "
            "with text keys in extras."
        ) from None
    if not same:
        raise RolloutError(
            f"{_named(rollout, position)}: extras {short(rollout.extras)} would come back from "
            "JSON changed. Keep only lists (no tuples) and dicts with text keys in extras."
        )


def _named(rollout: Rollout, position: int) -> str:
    return f"Rollout {short(rollout.rollout_id)} (position {position})"
