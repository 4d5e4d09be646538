"""forkpoint's own files of rollouts: JSON lines, plain, gzip or zstd. Imports no torch.

A line holds one JSON object whose keys are the fields of `Rollout`; token_ids, loss_mask and
advantage are required. Blank lines between objects are allowed.
"""

import gzip
import json
import math
import os
import secrets
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.rollouts import Rollout, check_rollouts, short

_FIELDS = tuple(field.name for field in fields(Rollout))
REQUIRED = ("token_ids", "loss_mask", "advantage")
_SUFFIXES = (".jsonl", ".gz", ".zst")
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOCK_BYTES = 1 << 18


def as_path(path: str | os.PathLike[str], of: str) -> Path:
    """The path as an object. Raises ConfigError for what is none."""
    try:
        return Path(path)
    except TypeError:
        raise ConfigError(
            f"path is {short(path)} of type {type(path).__name__}; it takes the path of {of}, as "
            "text or a pathlib.Path."
        ) from None


def save_rollouts(path: str | os.PathLike[str], rollouts: Iterable[Rollout]) -> None:
    """Writes rollouts, one JSON object a line, so that `load_rollouts` gives equal ones.

    The suffix chooses the format: .jsonl plain, .gz gzip, .zst zstd. What was at `path` is replaced
    once everything is written; after an error it is as before.

    Raises RolloutError for another suffix, a missing folder, a path that is a directory, no
    rollouts, things that are none, a rollout_id that is there twice, and extras that JSON cannot
    give back as they are; and ConfigError for what is no path.
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
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            with _writer(file, path.suffix) as writer:
                for position, rollout in enumerate(rollouts):
                    writer.write(_line(rollout, position))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers, counted from 1.

    Whether it is plain, gzip or zstd is seen from its content, not from its name.

    Raises RolloutError where the file is cut short or damaged.
    """
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, path), start=1):
            if line.strip():
                yield number, line


def _lines(file: BufferedReader, path: Path) -> Iterator[bytes]:
    """The lines of a plain or compressed file, without their line feeds."""
    begun: list[bytes] = []  # of one line, put together once: it may be a whole batch
    try:
        for block in _blocks(file):
            first, *others = block.split(b"\n")
            begun.append(first)
            if others:
                *lines, last = others
                yield b"".join(begun)
                yield from lines
                begun = [last]
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise RolloutError(
            f"{path} is cut short or damaged: {error}. Copy or write the file again."
        ) from None
    yield b"".join(begun)


def _blocks(file: BufferedReader) -> Iterator[bytes]:
    """The content of a file, decompressed."""
    magic = file.peek(4)
    if magic.startswith(_ZSTD_MAGIC):
        # Not zstandard's stream_reader: it takes a file that is cut short for a complete one.
        frame = zstandard.ZstdDecompressor().decompressobj()
        while block := file.read(_BLOCK_BYTES):
            while block:
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(block)
                block = frame.unused_data
        if not frame.eof:
            raise EOFError("the last zstd frame has no end")
    else:
        reader = gzip.GzipFile(fileobj=file) if magic.startswith(_GZIP_MAGIC) else file
        while block := reader.read(_BLOCK_BYTES):
            yield block


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object on a line. Raises RolloutError, naming `where`, for anything else."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RolloutError(
            f"{where}: byte {error.start + 1} is 0x{line[error.start]:02x}, which is not UTF-8. "
            "Save the file as UTF-8, plain or compressed with gzip or zstd."
        ) from None
    if text.startswith("\ufeff"):
        raise RolloutError(
            f"{where} begins with a byte order mark. Save the file as UTF-8 without one."
        )
    try:
        record = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        rest = text[error.pos : error.pos + 40].strip()
        raise RolloutError(
            f"{where}, column {error.colno}: not JSON ({error.msg}), at "
            f"{short(rest) if rest else 'the end of the line'}. Each line holds one whole JSON "
            "object."
        ) from None
    except _KeyTwice as error:
        raise RolloutError(f"{where}: {error}. Leave one of the two out.") from None
    except RecursionError:
        raise RolloutError(
            f"{where}: lists or objects are nested too deeply. Write each rollout as one flat "
            "object."
        ) from None
    except ValueError:
        # Of Python's own limit, and with advice on how to raise it.
        raise RolloutError(
            f"{where}: a number has more than {sys.get_int_max_str_digits()} digits. Numbers of a "
            "rollout have a few; look at what wrote the line."
        ) from None
    if not isinstance(record, dict):
        listed = " Write the items of the list one a line." if isinstance(record, list) else ""
        raise RolloutError(
            f"{where} is {short(record)}; each line holds one JSON object with the keys "
            f"{', '.join(REQUIRED)}.{listed}"
        )
    return record


def rollout_of(record: dict[str, Any]) -> Rollout:
    """The rollout whose fields are a record's keys; keys that are no fields go into its extras.

    Raises RolloutError for a record that is none.
    """
    missing = [field for field in REQUIRED if field not in record]
    if missing:
        raise RolloutError(
            f"has no {', '.join(missing)}; its keys are {short(list(record))}. A rollout "
            f"needs {', '.join(REQUIRED)}; rename the keys or add them."
        )
    return Rollout(**_gather_extras(record))


class _KeyTwice(ValueError):
    """An object has a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _KeyTwice(f"the key {short(twice)} is there twice in one object")
    return record


def _gather_extras(record: dict[str, Any]) -> dict[str, Any]:
    """`record` with the keys that are no fields moved into its extras."""
    known = {key: value for key, value in record.items() if key in _FIELDS}
    unknown = {key: value for key, value in record.items() if key not in _FIELDS}
    extras = known.get("extras")
    if extras is not None and not isinstance(extras, dict):
        return known  # Rollout refuses it
    for key in unknown:
        if key in (extras or {}):
            raise RolloutError(
                f"{short(key)} is a key of the line and of its extras. Unknown keys of a line are "
                "put into extras; rename or remove one of the two."
            )
    if unknown:
        known["extras"] = extras = unknown | (extras or {})
    for key, value in (extras or {}).items():
        if not _all_finite(value):
            raise RolloutError(
                f"extras[{short(key)}] is {short(value)}, but JSON has no NaN and no infinity. "
                "Write null or text instead."
            )
    return known


def _all_finite(value: object) -> bool:
    """Whether no number in a tree of dicts and lists is NaN or infinite."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, float) and not math.isfinite(item):
            return False
    return True


def _writer(file: BinaryIO, suffix: str) -> AbstractContextManager[Any]:
    """What compresses into `file`; leaving it ends the compressed stream and keeps `file` open."""
    if suffix == ".gz":  # no name and no time, so that equal rollouts make equal files
        return gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0)
    if suffix == ".zst":
        return zstandard.ZstdCompressor(write_checksum=True).stream_writer(file, closefd=False)
    return nullcontext(file)


def _line(rollout: Rollout, position: int) -> bytes:
    record: dict[str, Any] = {}
    for name in ("group_id", "rollout_id", *_FIELDS):  # names first, for who reads the file
        value = getattr(rollout, name)
        if name == "loss_mask":
            value = value.astype(int)  # 0 and 1 take a third of the bytes of false and true
        if value is not None:
            record[name] = value.tolist() if hasattr(value, "tolist") else value
    check_extras(rollout, position)
    line = json.dumps(record, allow_nan=False, separators=(",", ":"))
    return line.encode() + b"\n"


def check_extras(rollout: Rollout, position: int) -> None:
    """Raises RolloutError, naming the rollout, where JSON cannot give its extras back as they are.

    `position` is the rollout's place among those that are written.
    """
    try:
        text = json.dumps(rollout.extras, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RolloutError(
            f"{_named(rollout, position)}: extras {short(rollout.extras)} cannot be written as "
            f"JSON: {error}. Keep only text, finite numbers, booleans, None, lists and dicts "
            "with text keys in extras."
        ) from None
    if json.loads(text) != rollout.extras:
        raise RolloutError(
            f"{_named(rollout, position)}: extras {short(rollout.extras)} would come back from "
            "JSON changed. Keep only lists (no tuples) and dicts with text keys in extras."
        )


def _named(rollout: Rollout, position: int) -> str:
    return f"Rollout {short(rollout.rollout_id)} (position {position})"
