"""Files that a reader must answer in bounded time and memory: each by its name and what writes it.

Those that are read are marked; all others are refused. None takes long or much memory to write.
"""

import gzip
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from made_parquet import (
    BYTE_ARRAY,
    DELTA_BYTE_ARRAY,
    DOUBLE,
    FIXED,
    RLE_DICTIONARY,
    ZSTD,
    Column,
    Page,
    dictionary,
    flat,
    levels,
    parquet,
    repeated,
    run,
)

MIB = 1 << 20
Write = Callable[[Path], Path]


@dataclass(frozen=True)
class Bomb:
    """A file by what writes it into a folder.

    read: whether its rollouts are read.
    options: of the command line, with which it is read.
    slow: whether it takes seconds, so that `make test` does not try it.
    """

    write: Write
    read: bool = False
    options: tuple[str, ...] = ()
    slow: bool = False


# Lines ------------------------------------------------------------------------------------------


def line(ids: Iterable[int], **more: Any) -> bytes:
    """A rollout as a line of JSON, everything but the first token trained."""
    ids = list(ids)
    values = {"token_ids": ids, "loss_mask": [0] + [1] * (len(ids) - 1), "advantage": 1, **more}
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def with_value(value: str, name: str = "x") -> bytes:
    """A small rollout with one more field, which is text of JSON as it is."""
    return line([1, 2])[:-2] + f',"{name}":{value}}}\n'.encode()


def _zstd(chunks: Iterable[bytes], **parameters: Any) -> Iterator[bytes]:
    compressor = zstandard.ZstdCompressor(**parameters).compressobj()
    yield from map(compressor.compress, chunks)
    yield compressor.flush()


def _gzip(chunks: Iterable[bytes]) -> Iterator[bytes]:
    compressor = zlib.compressobj(6, wbits=31)
    yield from map(compressor.compress, chunks)
    yield compressor.flush()


def written(name: str, chunks: Callable[[], Iterable[bytes]]) -> Write:
    def write(folder: Path) -> Path:
        path = folder / name
        with path.open("wb") as file:
            file.writelines(chunks())
        return path

    return write


def plain(*content: bytes | Callable[[], bytes]) -> Write:
    """Content that is large is made where it is written, and not by every import of this file."""
    return written("x.jsonl", lambda: [c if isinstance(c, bytes) else c() for c in content])


def zst(chunks: Callable[[], Iterable[bytes]], **parameters: Any) -> Write:
    return written("x.jsonl.zst", lambda: _zstd(chunks(), **parameters))


def gz(chunks: Callable[[], Iterable[bytes]]) -> Write:
    return written("x.jsonl.gz", lambda: _gzip(chunks()))


def times(chunk: bytes, count: int) -> Callable[[], Iterator[bytes]]:
    return lambda: (chunk for _ in range(count))


def long_rollout(tokens: int) -> Iterator[bytes]:
    """One rollout of so many tokens, a million at a time."""
    step = 1 << 20
    yield b'{"token_ids":[1'
    for begin in range(1, tokens, step):
        yield b",1" * min(step, tokens - begin)
    yield b'],"loss_mask":[0'
    for begin in range(1, tokens, step):
        yield b",1" * min(step, tokens - begin)
    yield b'],"advantage":1}\n'


def sparse(folder: Path) -> Path:
    """A terabyte of zeros behind one rollout, of which the disk has one block."""
    path = folder / "x.jsonl"
    path.write_bytes(line(range(100)))
    os.truncate(path, 1 << 40)
    return path


def rle_frame(blocks: int) -> bytes:
    """A zstd frame of blocks that repeat one byte 128 KiB times, in four bytes each."""
    size = 1 << 17
    body = b"".join(
        (size << 3 | 1 << 1 | (n == blocks - 1)).to_bytes(3, "little") + b"1" for n in range(blocks)
    )
    return b"\x28\xb5\x2f\xfd" + bytes([0x00, 0x58]) + body


EMPTY_ZSTD = zstandard.ZstdCompressor().compress(b"")
SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"
GOOD = line([1, 2, 3])
WIDE_WINDOW = {
    "compression_params": zstandard.ZstdCompressionParameters(window_log=30, compression_level=1)
}

COMPRESSED: dict[str, Bomb] = {
    "zeros in zstd": Bomb(zst(times(bytes(MIB), 200))),
    "zeros in gzip": Bomb(gz(times(bytes(MIB), 60))),
    "zeros in zstd, two rollouts": Bomb(
        zst(lambda: [GOOD, line([4, 5]), *times(bytes(MIB), 200)()]),
        read=True,
        options=("--limit", "2"),
    ),
    "zeros in gzip, two rollouts": Bomb(
        gz(lambda: [GOOD, line([4, 5]), *times(bytes(MIB), 60)()]),
        read=True,
        options=("--limit", "2"),
    ),
    "blocks of four bytes": Bomb(written("x.zst", lambda: [rle_frame(4000)])),
    "line feeds in zstd": Bomb(zst(times(b"\n" * MIB, 200))),
    "line feeds in gzip": Bomb(gz(times(b"\n" * MIB, 60))),
    "spaces in zstd": Bomb(zst(times(b" " * MIB, 200))),
    "lines that are not JSON": Bomb(zst(times(b"x\n" * MIB, 100)), options=("--on-error", "skip")),
    "rollouts that are all the same": Bomb(zst(times(line([1] * 1000) * 50, 1000))),
    "rollouts that are all the same, in gzip": Bomb(gz(times(line([1] * 1000) * 50, 300))),
    "a million rollouts of one token": Bomb(zst(times(line([1]) * 1000, 1000)), slow=True),
    "a rollout of 100 million tokens": Bomb(zst(lambda: long_rollout(100_000_000))),
    "a rollout of 6 million tokens": Bomb(gz(lambda: long_rollout(6_000_000))),
    "a rollout of 2 million tokens": Bomb(zst(lambda: long_rollout(2_000_000)), read=True),
    "a window of 1 GiB": Bomb(zst(lambda: [GOOD], **WIDE_WINDOW)),
    "zstd of gzip": Bomb(zst(lambda: [gzip.compress(bytes(MIB))])),
    "gzip of zstd": Bomb(gz(lambda: [zstandard.compress(GOOD)])),
    "gzip of gzip": Bomb(gz(lambda: [gzip.compress(GOOD)])),
    "a million empty frames": Bomb(written("x", lambda: [EMPTY_ZSTD * 1_000_000]), slow=True),
    "a million empty frames and a rollout": Bomb(
        written("x", lambda: [EMPTY_ZSTD * 300_000, zstandard.compress(GOOD)]), read=True
    ),
    "skippable frames": Bomb(
        written("x", lambda: [SKIPPABLE * 300_000, zstandard.compress(GOOD), SKIPPABLE]), read=True
    ),
    "a hundred thousand empty members": Bomb(
        written("x", lambda: [gzip.compress(b"") * 100_000, gzip.compress(GOOD)]), read=True
    ),
    "a member whose name has no end": Bomb(
        written("x", lambda: [b"\x1f\x8b\x08\x08" + bytes(6) + b"x" * 20 * MIB])
    ),
    "zeros after gzip": Bomb(
        written("x", lambda: [gzip.compress(GOOD), bytes(30 * MIB)]), read=True
    ),
    "zstd cut short": Bomb(written("x", lambda: [b"".join(_zstd([GOOD * 1000]))[:-3]])),
    "gzip cut short": Bomb(written("x", lambda: [b"".join(_gzip([GOOD * 1000]))[:-3]])),
    "a file with a hole": Bomb(sparse, read=True, options=("--limit", "1")),
    "a file with a hole, read on": Bomb(sparse),
}

HALF = "\\ud83d"
JSON: dict[str, Bomb] = {
    "keys by the million": Bomb(
        plain(lambda: b'{"token_ids":[1],' + b",".join(b'"%d":0' % n for n in range(400_000))
              + b"}\n")
    ),
    "a key twice, after many": Bomb(
        plain(lambda: b"{" + b",".join(b'"%d":0' % n for n in range(200_000)) + b',"0":0}\n')
    ),
    "the same key over and over": Bomb(
        plain(lambda: b"{" + b",".join([b'"a":0'] * 500_000) + b"}\n")),
    "empty lists": Bomb(plain(lambda: with_value("[" + "[]," * 4_000_000 + "[]]"))),
    "empty objects": Bomb(plain(lambda: with_value("[" + "{}," * 4_000_000 + "{}]"))),
    "lists of lists": Bomb(
        plain(lambda: with_value("[" + "[[[[]]]]," * 1_000_000 + "[]]")), slow=True
    ),
    "brackets": Bomb(plain(lambda: with_value("[" * 5_000_000))),
    "nested as deep as is read": Bomb(plain(with_value("[" * 900 + "]" * 900)), read=True),
    "a number of a million digits": Bomb(plain(lambda: with_value("9" * 1_000_000))),
    "an exponent of a million digits": Bomb(plain(lambda: with_value("1e" + "9" * 1_000_000))),
    "a large exponent": Bomb(plain(with_value("1e999999999"))),
    "a small exponent": Bomb(plain(with_value("1e-999999999")), read=True),
    "a fraction of a million digits": Bomb(
        plain(lambda: with_value("0." + "3" * 1_000_000)), read=True),
    "an id of hundreds of digits": Bomb(plain(b'{"token_ids":[%s],"loss_mask":[0],"advantage":1}'
                                              % (b"9" * 400))),
    "an advantage of hundreds of digits": Bomb(plain(
        b'{"token_ids":[1,2],"loss_mask":[0,1],"advantage":[%s,0.5]}' % (b"9" * 400))),
    "text of 20 MiB": Bomb(plain(lambda: with_value('"' + "x" * 20 * MIB + '"')), read=True),
    "text of wide characters": Bomb(
        plain(lambda: with_value('"😀' + "x" * 10 * MIB + '"')), read=True),
    "text of escapes": Bomb(plain(lambda: with_value('"' + "\\u20ac" * 2 * MIB + '"')), read=True),
    "halves of surrogate pairs": Bomb(
        plain(with_value(f'"{HALF}"', "group_id"), with_value(f'"{HALF}"', HALF)), read=True
    ),
    "halves of surrogate pairs for a tokenizer": Bomb(
        plain(b'{"input":"\\ud83d","output":"b","score":1}\n')
    ),
    "NaN in the ids": Bomb(plain(b'{"token_ids":[NaN],"loss_mask":[0],"advantage":1}\n')),
    "Infinity": Bomb(plain(b'{"token_ids":[1,2],"loss_mask":[0,1],"advantage":-Infinity}\n')),
    "a byte order mark": Bomb(plain(b"\xef\xbb\xbf" + GOOD)),
    "UTF-16": Bomb(plain(GOOD.decode().encode("utf-16"))),
    "UTF-16 without a mark": Bomb(plain(GOOD.decode().encode("utf-16-le"))),
    "bytes that are no UTF-8": Bomb(plain(lambda: b"\xff" * 5 * MIB)),
    "a line that has no end": Bomb(plain(lambda: b'{"token_ids":[' + b"1," * 15 * MIB)),
    "a text that has no end": Bomb(plain(lambda: b'{"token_ids":"' + b"\\n" * 5 * MIB)),
    "blank lines": Bomb(plain(lambda: b"\n" * 20 * MIB)),
    "lines of blanks": Bomb(plain(lambda: (b" " * 99 + b"\n") * 200_000)),
    "lines that are all wrong": Bomb(
        plain(lambda: b"[]\n" * 1_000_000), options=("--on-error", "skip")),
    "rollouts of one token": Bomb(plain(lambda: line([1]) * 400_000), slow=True),
    "rollouts of nothing": Bomb(
        plain(lambda: b'{"token_ids":[],"loss_mask":[],"advantage":1}\n' * 200_000),
        options=("--on-error", "skip"),
    ),
    "one id for all": Bomb(
        plain(lambda: b"".join(line([n], rollout_id="a") for n in range(50_000))), read=True,
        options=("--on-error", "skip"),
    ),
}  # fmt: skip

# Tables ------------------------------------------------------------------------------------------


def table(**columns: Any) -> Write:
    return plain(lambda: json.dumps(columns, separators=(",", ":")).encode())


MANY = 20_000
PACKED = {
    "input_ids": [1] * MANY,
    "position_ids": [0] * MANY,
    "loss_mask": [0] * MANY,
    "advantages": [0.5] * MANY,
    "inference_logprobs": [-1.0] * MANY,
}
TABLES: dict[str, Bomb] = {
    "samples of one token in one row": Bomb(table(**PACKED), read=True),
    "many rows that share many fields": Bomb(
        table(token_ids=[[1]] * MANY, loss_mask=[[0]] * MANY, advantage=1,
              **{f"k{n}": n for n in range(MANY)})),
    "many rows of a trainer that share many fields": Bomb(
        table(tokens=[[1, 2]] * MANY, response_lengths=[1] * MANY, rewards=[0.5] * MANY,
              **{f"k{n}": n for n in range(MANY)}), read=True),
    "many rows that are wrong and share many fields": Bomb(
        table(tokens=[["a"]] * MANY, response_lengths=[1] * MANY,
              **{f"k{n}": n for n in range(MANY)}), options=("--on-error", "skip")),
    "a row as long as the batch": Bomb(
        table(token_ids=[[1]] * MANY, loss_mask=[[0] * MANY] + [[0]] * (MANY - 1),
              advantage=[0.5] * MANY)),
    "rows that grow": Bomb(
        table(input_ids=[[1] * n for n in range(1, 1500)], token_mask=[[0] * 1500] * 20,
              input_lengths=list(range(1, 1500)))),
    "samples of one token in one row, of ragged fields": Bomb(
        table(**{**PACKED, "advantages": [[0.5], 0.5] * (MANY // 2)})),
    "ids of lists": Bomb(table(token_ids=[[[1] * 1000] * 1000], loss_mask=[[0]], advantage=[1])),
    "ids of texts": Bomb(table(token_ids=["1" * 1000] * 1000, loss_mask=[0] * 1000, advantage=1)),
    "a text among ids": Bomb(
        table(token_ids=["x" * MIB, *[1] * 100_000], loss_mask=[0] * 100_001, advantage=1)),
    "a number that is a list": Bomb(
        table(token_ids=[1, 2], loss_mask=[0, 1], advantage=[[[[[[1]]]]]])),
    "samples in lists of lists": Bomb(plain(b"[" * 500 + b"]" * 500)),
}  # fmt: skip

# Parquet -----------------------------------------------------------------------------------------


def column_of_ones(rows: int) -> Column:
    return flat("advantage", DOUBLE, struct.pack("<d", 1.0) * rows, rows)


def own(rows: int = 2, each: int = 3) -> list[Column]:
    """forkpoint's own columns, of few bytes however long."""
    return [
        *(repeated("token_ids", rows, each), repeated("loss_mask", rows, each, 0)),
        column_of_ones(rows),
    ]


def changed(column: Column, page: int, **changes: Any) -> Column:
    pages = list(column.pages)
    pages[page] = replace(pages[page], **changes)
    return replace(column, pages=tuple(pages))


def zipped(column: Column) -> Column:
    """Its pages compressed with zstd, whatever is in them."""
    pages = (
        replace(page, content=zstandard.compress(page.content), declared_bytes=len(page.content))
        for page in column.pages
    )
    return replace(column, codec=ZSTD, pages=tuple(pages))


def by_dictionary(name: str, kind: int, value: bytes, rows: int, **more: Any) -> Column:
    """A column of one value that all rows repeat."""
    data = Page(levels(run(1, rows, 1)) + bytes([1]) + run(0, rows, 1), rows, RLE_DICTIONARY)
    return zipped(Column(name, kind, (dictionary(value, 1), data), **more))


def text(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value


def pq(columns: Callable[[], list[Column]], rows: int = 2, **declared: Any) -> Write:
    return written("x.parquet", lambda: [parquet(columns(), rows, **declared)])


def first(**changes: Any) -> Callable[[], list[Column]]:
    """forkpoint's own columns, where the header of a page of ids says something else."""
    return lambda: [changed(own()[0], 1, **changes), *own()[1:]]


PARQUET: dict[str, Bomb] = {
    "a file as it should be": Bomb(pq(own), read=True),
    "pages of zstd": Bomb(pq(lambda: [zipped(column) for column in own()]), read=True),
    "a row of a billion tokens": Bomb(pq(lambda: own(1, 10**9), 1)),
    "a row of a million tokens": Bomb(pq(lambda: own(1, 10**6), 1), read=True),
    "a page of 2 billion values": Bomb(pq(first(values=2**31 - 1))),
    "a page of less than nothing": Bomb(pq(first(values=-5))),
    "a page of 2 GiB": Bomb(
        pq(lambda: [changed(zipped(own()[0]), 1, declared_bytes=2**31 - 1), *own()[1:]])),
    "a dictionary of 2 GiB": Bomb(
        pq(lambda: [changed(zipped(own()[0]), 0, declared_bytes=2**31 - 1), *own()[1:]])),
    "a dictionary of 2 billion values": Bomb(
        pq(lambda: [changed(own()[0], 0, values=2**31 - 1), *own()[1:]])),
    "a page that is longer than the file": Bomb(pq(first(stored_bytes=2**31 - 1))),
    "a page of no bytes": Bomb(pq(first(stored_bytes=0))),
    "a column of 2**40 values": Bomb(
        pq(lambda: [replace(own()[0], values=2**40), *own()[1:]]), read=True),
    "2**50 rows": Bomb(pq(own, num_rows=2**50, file_rows=2**50), read=True),
    "rows below 0": Bomb(pq(own, num_rows=-(2**50))),
    "a column beyond the file": Bomb(
        pq(lambda: [replace(own()[0], declared={7: 2**62}), *own()[1:]])),
    "no columns and many rows": Bomb(pq(list, 0, num_rows=2**40, file_rows=2**40)),
    "a million nulls": Bomb(
        pq(lambda: [Column("token_ids", 2, (Page(levels(run(0, 10**6, 1)), 10**6),))], 10**6)),
    "values of 2 GiB each": Bomb(
        pq(lambda: [*own(), by_dictionary("f", FIXED, b"", 2, length=2**31 - 1)])),
    "a text of 10 MiB for 10,000 rows": Bomb(
        pq(lambda: [by_dictionary("s", BYTE_ARRAY, text(b"x" * 10 * MIB), 10**4)], 10**4)),
    "bytes of 1 MiB for 100,000 rows": Bomb(
        pq(lambda: [by_dictionary("f", FIXED, b"x" * MIB, 10**5, length=MIB)], 10**5)),
    "text of 200 MiB": Bomb(
        pq(lambda: [*own(1), zipped(flat("s", BYTE_ARRAY, text(bytes(200 * MIB)), 1))], 1)),
    "texts that repeat those before": Bomb(
        pq(lambda: [Column("s", BYTE_ARRAY,
                           (Page(bytes(MIB), 10**5, DELTA_BYTE_ARRAY),))], 10**5)),
    "10,000 columns": Bomb(
        pq(lambda: [*own(), *(flat(f"c{n}", DOUBLE, bytes(16), 2) for n in range(10_000))]),
        read=True),
    "no metadata": Bomb(written("x.parquet", lambda: [b"PAR1" + bytes(1000) + b"PAR1"])),
    "metadata longer than the file": Bomb(
        written("x.parquet", lambda: [b"PAR1" + bytes(99) + b"\xff\xff\xff\x7fPAR1"])),
    "a schema of a billion elements": Bomb(
        written("x.parquet", lambda: [
            b"PAR1\x15\x04\x19\xfc\xff\xff\xff\xff\x03" + bytes(99) + struct.pack("<I", 108)
            + b"PAR1"])),
}  # fmt: skip

# safetensors -------------------------------------------------------------------------------------


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> Write:
    """A file of this header, which is text, what JSON is made of, or a call that gives either."""

    def content() -> list[bytes]:
        given = header() if callable(header) else header
        encoded = given if isinstance(given, bytes) else json.dumps(given).encode()
        said = len(encoded) if length is None else length
        return [said.to_bytes(8, "little"), encoded, data]

    return written("x.safetensors", content)


def tensor(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


IDS = tensor("I64", [2, 2], 0, 32)
MASK = tensor("BOOL", [2, 2], 32, 36)
TWO = np.array([[1, 2], [3, 4]], "<i8").tobytes() + bytes([0, 1, 0, 1])
SAFETENSORS: dict[str, Bomb] = {
    "a file as it should be": Bomb(safetensors(
        {"token_ids": IDS, "loss_mask": MASK, "advantage": tensor("F64", [2], 36, 52)},
        TWO + struct.pack("<2d", 1, 2)), read=True),
    "bfloat16": Bomb(safetensors(
        {"token_ids": IDS, "loss_mask": MASK, "advantage": tensor("BF16", [2], 36, 40)},
        TWO + b"\x80\x3f\x80\x3f"), read=True),
    "a header longer than the file": Bomb(safetensors({"a": IDS}, TWO, length=2**62)),
    "a header of 2**63 bytes": Bomb(safetensors({"a": IDS}, TWO, length=2**63)),
    "a header of many tensors": Bomb(safetensors(
        lambda: {f"t{n}": tensor("U8", [0], 0, 0) for n in range(100_000)})),
    "a header of empty objects": Bomb(safetensors(
        lambda: b'{"a":[' + b"{}," * 4_000_000 + b"{}]}")),
    "a header that is nested": Bomb(safetensors(b'{"a":' * 100_000)),
    "a header with a key twice": Bomb(safetensors(b'{"a":1,"a":2}')),
    "a header that is a list": Bomb(safetensors([IDS])),
    "a shape of 2**62 entries": Bomb(safetensors({"token_ids": tensor("I64", [2**62], 0, 32)},
                                                 TWO)),
    "a shape whose product is beyond 64 bits": Bomb(
        safetensors({"token_ids": tensor("I64", [2**32, 2**32, 4], 0, 32)}, TWO)),
    "a shape of 2**40 rows of nothing": Bomb(
        safetensors({"token_ids": tensor("I64", [2**40, 0], 0, 0)})),
    "a shape of nothing by 2**60": Bomb(
        safetensors({"token_ids": tensor("I64", [0, 2**60], 0, 0)})),
    "a shape of a thousand dimensions": Bomb(
        safetensors({"token_ids": tensor("I64", [1] * 1000, 0, 8)}, bytes(8))),
    "a shape below 0": Bomb(safetensors({"token_ids": tensor("I64", [-2, -2], 0, 32)}, TWO)),
    "a shape that is no list": Bomb(safetensors({"token_ids": tensor("I64", 4, 0, 32)}, TWO)),
    "a shape of a fraction": Bomb(safetensors({"token_ids": tensor("I64", [4.0], 0, 32)}, TWO)),
    "a shape of numbers of a thousand digits": Bomb(
        safetensors({"token_ids": tensor("I64", [10**1000], 0, 32)}, TWO)),
    "offsets that overlap": Bomb(safetensors({"token_ids": IDS, "loss_mask": IDS}, TWO[:32])),
    "offsets below 0": Bomb(safetensors({"token_ids": tensor("I64", [4], -32, 0)}, TWO)),
    "offsets with a hole": Bomb(safetensors({"token_ids": tensor("I64", [4], 4, 36)}, TWO)),
    "offsets the wrong way round": Bomb(safetensors({"token_ids": tensor("I64", [0], 8, 0)}, TWO)),
    "data that nobody has": Bomb(safetensors({"token_ids": IDS}, TWO + bytes(100))),
    "a dtype that is none": Bomb(safetensors({"token_ids": tensor("I65", [4], 0, 32)}, TWO)),
    "a dtype that is a list": Bomb(safetensors({"token_ids": tensor([], [4], 0, 32)}, TWO)),
    "metadata of numbers": Bomb(safetensors({"__metadata__": {"a": 1}, "token_ids": IDS}, TWO)),
    "metadata that is text": Bomb(safetensors({"__metadata__": "a", "token_ids": IDS}, TWO)),
    "rows of wrong lengths": Bomb(safetensors(
        {"token_ids": IDS, "loss_mask": tensor("BOOL", [2, 2, 1], 32, 36),
         "advantage": tensor("F64", [2], 36, 52)}, TWO + bytes(16))),
}  # fmt: skip

CLASSES: dict[str, dict[str, Bomb]] = {
    "compressed": COMPRESSED,
    "JSON": JSON,
    "tables": TABLES,
    "parquet": PARQUET,
    "safetensors": SAFETENSORS,
}
