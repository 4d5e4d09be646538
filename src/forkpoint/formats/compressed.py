"""The content of a file in blocks, whether it is plain, gzip or zstd. Imports no torch.

Compressed bytes are given to the decompressor in small pieces, so that one block has a bound
whatever the ratio: deflate gives at most 1,032 bytes for one, and zstd 128 KiB for four.
"""

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from forkpoint.errors import RolloutError
from forkpoint.formats.limits import MIB, MemoryLimit, shown

BLOCK_BYTES = 1 << 18
_NOT_BLANK = re.compile(rb"\S[^\n]*")
GZIP_PIECE_BYTES = 1 << 12
ZSTD_PIECE_BYTES = 1 << 9
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = tuple(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16))
COMPRESSED = (GZIP_MAGIC, ZSTD_MAGIC, *_ZSTD_SKIPPABLE)
"""First bytes of compressed files. A skippable frame holds nothing; pzstd writes one first."""
_FRAME_HEADER_BYTES = 18
_MOST_PIECES = 256
_USUAL_WINDOW_BYTES = 128 * MIB
_LARGEST_WINDOW_BYTES = 1 << 31


def blocks(file: Any, path: Path, memory: MemoryLimit) -> Iterator[bytes]:
    """The content of a file, decompressed, in blocks of at most a few MiB.

    Raises RolloutError, naming the file, where it is cut short, damaged, compressed twice, inflates
    far beyond what is read of it, or wants a larger window than the limit allows.
    """
    head = file.peek(4)
    if not head.startswith(COMPRESSED):
        while block := file.read(BLOCK_BYTES):
            yield block
        return
    given = yielded = 0
    held: list[bytes] = []  # small pieces: a small file is seen to be whole before it is given
    decompressed = _gzip(file) if head.startswith(GZIP_MAGIC) else _zstd(file, path, memory)
    try:
        for piece in decompressed:
            if not given and piece.startswith(COMPRESSED):
                raise RolloutError(
                    f"{path} is compressed twice: what it holds is compressed as well. Decompress "
                    "it once."
                )
            given += len(piece)
            memory.check_inflation(file.tell(), given)
            held.append(piece)
            if given - yielded >= BLOCK_BYTES or len(held) == _MOST_PIECES:
                yield b"".join(held)
                held, yielded = [], given
        yield b"".join(held)
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise RolloutError(
            f"{path} is cut short or damaged: {error}. Copy or write the file again."
        ) from None


def _gzip(file: Any) -> Iterator[bytes]:
    rest = b""
    while True:
        # Members may be followed by zeros, as on tapes.
        while not (rest := rest.lstrip(b"\0")) and (piece := file.read(GZIP_PIECE_BYTES)):
            rest = piece
        rest += file.read(max(0, len(GZIP_MAGIC) - len(rest)))
        if not rest:
            return
        if not rest.startswith(GZIP_MAGIC):
            raise gzip.BadGzipFile(f"Not a gzipped file ({rest[:2]!r})")
        member = zlib.decompressobj(wbits=31)
        while True:
            yield member.decompress(rest)
            if member.eof:
                rest = member.unused_data
                break
            if not (rest := file.read(GZIP_PIECE_BYTES)):
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")


def _zstd(file: Any, path: Path, memory: MemoryLimit) -> Iterator[bytes]:
    # Not zstandard's stream_reader: it takes a file that is cut short for a complete one.
    largest = min(_LARGEST_WINDOW_BYTES, max(_USUAL_WINDOW_BYTES, memory.limit_bytes // 4))
    decompressor = zstandard.ZstdDecompressor(max_window_size=largest)
    rest = b""
    while True:
        rest += file.read(max(0, _FRAME_HEADER_BYTES - len(rest)))
        if not rest:
            return
        window = 0
        if not rest.startswith(_ZSTD_SKIPPABLE):
            window = zstandard.get_frame_parameters(rest).window_size
        if window > largest:
            raise RolloutError(
                f"{path} declares a zstd window of {shown(window)}, and by the limit on memory "
                f"({shown(memory.limit_bytes)}) at most {shown(largest)} are taken. Raise it "
                "(memory_limit=, --memory-limit) to four times the window, or compress the file "
                "again without --long."
            )
        frame = decompressor.decompressobj()
        with memory.holding(window, "the window of zstd"):
            while True:
                yield frame.decompress(rest)
                if frame.eof:
                    rest = frame.unused_data
                    break
                if not (rest := file.read(ZSTD_PIECE_BYTES)):
                    raise EOFError("the last zstd frame has no end")


def lines(
    path: Path, memory: MemoryLimit, cost: Callable[[bytes | bytearray], int]
) -> Iterator[tuple[int, bytes | bytearray]]:
    """The lines of a file that are not blank, without line feeds, and their numbers from 1.

    `cost` says how many bytes the caller's use of a line takes, the line included; they are charged
    to `memory` while it is used.
    """
    number = 0  # of the line that is begun, less one
    begun = bytearray()  # a line over several blocks: it may be a whole batch
    with path.open("rb", buffering=BLOCK_BYTES) as file:
        for block in blocks(file, path, memory):
            with memory.holding(len(block), "decompressed content"):
                at = 0
                if begun and (at := block.find(b"\n") + 1):
                    begun += memoryview(block)[: at - 1]
                    number, line, begun = number + 1, begun, bytearray()
                    if not line.isspace():
                        with memory.holding(cost(line), f"line {number}"):
                            yield number, line
                    del line
                last = block.rfind(b"\n") + 1
                # From the first byte that is not blank to the end of its line.
                for found in _NOT_BLANK.finditer(block, at, last):
                    number += block.count(b"\n", at, found.start()) + 1
                    begin = max(at, block.rfind(b"\n", at, found.start()) + 1)
                    line, at = block[begin : found.end()], found.end() + 1
                    with memory.holding(cost(line), f"line {number}"):
                        yield number, line
                    del line
                if last > at:
                    number, at = number + block.count(b"\n", at, last), last
                held = (len(begun) + len(block) - at) * 9 // 8  # which a bytearray takes at most
                if held > memory.left_bytes:
                    raise memory.refusal(held, f"line {number + 1}, which has no end so far,")
                begun += memoryview(block)[at:]
    if begun and not begun.isspace():
        with memory.holding(cost(begun), f"line {number + 1}"):
            yield number + 1, begun
