"""JSON lines, plain or compressed with gzip or zstd: one object a line, parsed strictly.

Imports no torch; zstandard is imported when a file is compressed with zstd.
"""

import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.files import REQUIRED, import_extra
from forkpoint.rollouts.formats.limits import TIMES_FILE, MemoryLimit
from forkpoint.units import MIB, format_bytes

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGICS = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16)))
"""First bytes of a frame, and of a skippable one, which holds nothing; pzstd writes one first."""
COMPRESSED = (GZIP_MAGIC, *ZSTD_MAGICS)
_ZSTD_PIECE_BYTES = 1 << 9
"""Compressed bytes that are decompressed at a time: four of them may stand for 128 KiB."""
_USUAL_WINDOW_BYTES = 128 * MIB
_LARGEST_WINDOW_BYTES = 1 << 31


def json_lines(path: Path, memory: MemoryLimit) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, without line feeds, with their numbers from 1.

    Whether it is plain, gzip or zstd is seen from its content, not from its name. A line may take a
    sixteenth of the memory that is left, because parsing it takes up to 16 times its bytes.

    Raises RolloutError where the file is cut short or damaged, has a longer line, or has as many
    bytes of blank lines.
    """
    try:
        with _opened(path, memory) as file:
            number = blank_bytes = 0
            while line := file.readline((most := memory.left_bytes // TIMES_FILE) + 1):
                number += 1
                if len(line) > most:
                    raise memory.refusal(
                        TIMES_FILE * len(line), f"line {number} (its first {len(line):,} bytes)"
                    )
                if not line.isspace():
                    yield number, line.removesuffix(b"\n")
                    continue
                # A small compressed file may hold any number of them.
                blank_bytes += len(line)
                if blank_bytes > most:
                    raise memory.refusal(TIMES_FILE * blank_bytes, "its blank lines")
    except (EOFError, gzip.BadGzipFile, zlib.error, _ZstdDamage) as error:
        raise RolloutError(
            f"{path} is cut short or damaged: {error}. Copy or write the file again."
        ) from None


def _opened(path: Path, memory: MemoryLimit) -> io.BufferedIOBase:
    """The content of a file, decompressed."""
    with path.open("rb") as file:
        head = file.read(4)
    if head.startswith(GZIP_MAGIC):
        return gzip.open(path)
    if head.startswith(ZSTD_MAGICS):
        return io.BufferedReader(_Zstd(path, memory.limit_bytes // 4))
    return path.open("rb")


class _ZstdDamage(Exception):
    """An error of zstandard, which is not imported where this is caught."""


class _Zstd(io.RawIOBase):
    """The content of a zstd file. zstandard's own stream_reader takes a file that is cut short for
    a complete one.

    window_bytes: the largest window that a frame may ask for, if more than usual.
    """

    def __init__(self, path: Path, window_bytes: int) -> None:
        zstandard = import_extra("zstandard", "zstd", f"{path} is compressed with zstd, which")
        most = min(_LARGEST_WINDOW_BYTES, max(_USUAL_WINDOW_BYTES, window_bytes))
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=most).decompressobj
        self._error = zstandard.ZstdError
        self._windows = (
            f"windows up to {format_bytes(most)} are taken; raise the limit for larger ones"
        )
        self._file = path.open("rb")
        self._frame: Any = None
        self._rest = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._rest = self._rest or self._file.read(_ZSTD_PIECE_BYTES)
            if not self._rest:
                if self._frame is not None:
                    raise _ZstdDamage("the last zstd frame has no end")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._content = memoryview(self._frame.decompress(self._rest))
            except self._error as error:
                raise _ZstdDamage(f"{error} ({self._windows})") from None
            self._rest = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._content))
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object on a line. Raises RolloutError, naming `where`, for anything else."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RolloutError(
            f"{where}: byte {error.start + 1} is 0x{line[error.start]:02x}, which is not UTF-8. "
            "Save the file as UTF-8, plain or compressed once with gzip or zstd."
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


def parse_strictly(content: bytes | bytearray | str) -> Any:
    """JSON as the standard has it: no key twice, no NaN, no infinity.

    Raises ValueError, saying why, for anything else.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


class _KeyTwice(ValueError):
    """An object has a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        seen: set[str] = set()
        # A set's add gives None: the first key that is in it already.
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _KeyTwice(f"the key {short(twice)} is there twice in one object")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
