"""Reader of JSON lines, plain or compressed with gzip or zstd: one object per line, parsed
strictly.

Imports no torch; zstandard is imported when a file is compressed with zstd.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.files import REQUIRED, import_extra
from forkpoint.rollouts.formats.limits import TIMES_FILE, MemoryLimit
from forkpoint.rollouts.schema import SchemaError, parse_json
from forkpoint.units import MIB

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGICS = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16)))
"""First bytes of a zstd frame, and of a skippable frame, which has no content. pzstd writes a
skippable frame first."""
COMPRESSED = (GZIP_MAGIC, *ZSTD_MAGICS)
_ZSTD_PIECE_BYTES = 1 << 9
"""Number of compressed bytes that are decompressed at a time. Four bytes can expand to 128 KiB."""
_USUAL_WINDOW_BYTES = 128 * MIB
_LARGEST_WINDOW_BYTES = 1 << 31


def json_lines(path: Path, memory: MemoryLimit) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers from 1.

    Compression is recognised by content. A line may have a sixteenth of the bytes of the limit on a
    piece, because parsing takes up to 16 times its bytes.

    Raises RolloutError if the file is truncated or damaged, or has a longer line.
    """
    number, parts, size = 1, [], 0
    for piece in _pieces(path, memory):
        for part in io.BytesIO(piece):
            parts.append(part)
            size += len(part)
            memory.check(TIMES_FILE * size, f"line {number}")
            if part.endswith(b"\n"):
                if (line := b"".join(parts)).strip():
                    yield number, line.removesuffix(b"\n")
                number, parts, size = number + 1, [], 0
    if (line := b"".join(parts)).strip():
        yield number, line


def _pieces(path: Path, memory: MemoryLimit) -> Iterator[bytes]:
    """Yield the decompressed content of a file."""
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(0)
        if head.startswith(ZSTD_MAGICS):
            yield from _zstd_pieces(path, file, memory)
            return
        source = gzip.GzipFile(fileobj=file) if head.startswith(GZIP_MAGIC) else file
        try:
            while piece := source.read(MIB):
                yield piece
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise _damaged(path, error) from None


def _zstd_pieces(path: Path, file: io.BufferedReader, memory: MemoryLimit) -> Iterator[bytes]:
    """Yield the content of a zstd file. zstandard's stream_reader accepts truncated files."""
    zstandard = import_extra("zstandard", "zstd", f"{path} is compressed with zstd, which")
    window = min(_LARGEST_WINDOW_BYTES, max(_USUAL_WINDOW_BYTES, memory.piece_bytes // 4))
    frame: Any = None
    while piece := file.read(_ZSTD_PIECE_BYTES):
        while piece:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=window).decompressobj()
            try:
                yield frame.decompress(piece)
            except zstandard.ZstdError as error:
                reason = f"{error} (a larger memory_limit takes windows above {window} bytes)"
                raise _damaged(path, reason) from None
            piece = frame.unused_data
            frame = None if frame.eof else frame
    if frame is not None:
        raise _damaged(path, "the last zstd frame has no end")


def _damaged(path: Path, reason: object) -> RolloutError:
    return RolloutError(f"{path} is truncated or damaged: {reason}. Copy or write the file again.")


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """Parse the JSON object of a line. Raises RolloutError, naming `where`, for other values."""
    try:
        record = parse_json(line, allow_nan=True)
    except SchemaError as error:
        raise RolloutError(
            f"{where} is {error}. Each line holds one whole JSON object, in UTF-8, plain or "
            "compressed once with gzip or zstd."
        ) from None
    if not isinstance(record, dict):
        listed = " Write the items of the list one a line." if isinstance(record, list) else ""
        raise RolloutError(
            f"{where} is {short(record)}; each line holds one JSON object with the keys "
            f"{', '.join(REQUIRED)}.{listed}"
        )
    return record
