"""Parquet files written byte by byte, so that headers can say what is not so.

Thrift's compact protocol, as much of it as there is in such files.
"""

from dataclasses import dataclass, field, replace
from typing import Any

BOOLEAN, INT32, INT64, INT96, FLOAT, DOUBLE, BYTE_ARRAY, FIXED = range(8)
PLAIN, PLAIN_DICTIONARY, RLE, DELTA_BYTE_ARRAY, RLE_DICTIONARY = 0, 2, 3, 7, 8
UNCOMPRESSED, SNAPPY, GZIP, ZSTD = 0, 1, 2, 6
REQUIRED, OPTIONAL, REPEATED = range(3)
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _zigzag(number: int) -> bytes:
    return varint((number << 1) ^ (number >> 63))


def struct(fields: dict[int, Any]) -> bytes:
    """A struct of fields by their numbers: (type, value) or, where the value says it, the value."""
    out, before = bytearray(), 0
    for number, value in sorted(fields.items()):
        if value is None:
            continue
        kind, content = _encoded(value)
        step = number - before
        out += bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + _zigzag(number)
        out += content
        before = number
    return bytes(out) + b"\0"


def _encoded(value: Any) -> tuple[int, bytes]:
    if isinstance(value, I32):
        return _I32, _zigzag(value)
    if isinstance(value, int):
        return _I64, _zigzag(value)
    if isinstance(value, bytes):
        return _BINARY, varint(len(value)) + value
    if isinstance(value, dict):
        return _STRUCT, struct(value)
    kinds = [_encoded(item) for item in value]
    kind = kinds[0][0] if kinds else _STRUCT
    head = (
        bytes([len(kinds) << 4 | kind])
        if len(kinds) < 15
        else (bytes([15 << 4 | kind]) + varint(len(kinds)))
    )
    return _LIST, head + b"".join(content for _, content in kinds)


class I32(int):
    """A number that Thrift declares to be of 32 bits."""


def run(value: int, count: int, width: int) -> bytes:
    """`count` times one value, in RLE of `width` bits."""
    return varint(count << 1) + value.to_bytes((width + 7) // 8, "little")


@dataclass(frozen=True)
class Page:
    """A page, and what its header says of it."""

    content: bytes
    values: int
    encoding: int = PLAIN
    dictionary: bool = False
    declared_bytes: int | None = None
    stored_bytes: int | None = None

    def encode(self) -> bytes:
        size = len(self.content) if self.declared_bytes is None else self.declared_bytes
        stored = len(self.content) if self.stored_bytes is None else self.stored_bytes
        counts = {1: I32(self.values), 2: I32(self.encoding)}
        if not self.dictionary:
            counts |= {3: I32(RLE), 4: I32(RLE)}
        header = {1: I32(2 if self.dictionary else 0), 2: I32(size), 3: I32(stored)}
        return struct(header | {7 if self.dictionary else 5: counts}) + self.content


@dataclass(frozen=True)
class Column:
    """A column of one name, of values or of lists of values, and its pages."""

    name: str
    kind: int
    pages: tuple[Page, ...]
    listed: bool = False
    values: int | None = None
    length: int | None = None
    codec: int = UNCOMPRESSED
    declared: dict[int, Any] = field(default_factory=dict)
    """Fields of its metadata that say something else."""

    def schema(self) -> list[bytes]:
        leaf = {1: I32(self.kind), 4: self.name.encode()}
        if self.length is not None:
            leaf[2] = I32(self.length)
        if not self.listed:
            return [struct(leaf | {3: I32(OPTIONAL)})]
        outer = {3: I32(OPTIONAL), 4: self.name.encode(), 5: I32(1), 6: I32(3)}
        middle = {3: I32(REPEATED), 4: b"list", 5: I32(1)}
        return [struct(part) for part in (outer, middle, leaf | {3: I32(OPTIONAL), 4: b"element"})]


def parquet(columns: list[Column], rows: int, **declared: Any) -> bytes:
    """A file of one row group. `declared` gives `num_rows` or `total` where they say something
    else."""
    out, chunks = bytearray(b"PAR1"), []
    for column in columns:
        begin = len(out)
        data_begin = begin
        for page in column.pages:
            if page.dictionary:
                data_begin = len(out) + len(page.encode())
            out += page.encode()
        path = [column.name.encode(), *([b"list", b"element"] if column.listed else [])]
        values = sum(page.values for page in column.pages if not page.dictionary)
        metadata: dict[int, Any] = {
            1: I32(column.kind),
            2: [I32(page.encoding) for page in column.pages] + [I32(RLE)],
            3: path,
            4: I32(column.codec),
            5: values if column.values is None else column.values,
            6: len(out) - begin,
            7: len(out) - begin,
            9: data_begin,
        }
        if data_begin != begin:
            metadata[11] = begin
        chunks.append({2: begin, 3: metadata | column.declared})
    elements = [{4: b"schema", 5: I32(len(columns))}]
    raw = [struct(element) for element in elements]
    raw += [part for column in columns for part in column.schema()]
    group = {1: chunks, 2: declared.get("total", len(out)), 3: declared.get("num_rows", rows)}
    footer = _footer(raw, declared.get("file_rows", rows), group)
    return bytes(out) + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def _footer(schema: list[bytes], rows: int, group: dict[int, Any]) -> bytes:
    """The metadata of a file; elements of the schema are encoded already."""
    head = bytes([15 << 4 | _STRUCT]) + varint(len(schema)) + b"".join(schema)
    groups = _encoded([group])[1]
    return (
        bytes([1 << 4 | _I32]) + _zigzag(2)
        + bytes([1 << 4 | _LIST]) + head
        + bytes([1 << 4 | _I64]) + _zigzag(rows)
        + bytes([1 << 4 | _LIST]) + groups
        + b"\0"
    )  # fmt: skip


def levels(*runs: bytes) -> bytes:
    content = b"".join(runs)
    return len(content).to_bytes(4, "little") + content


def flat(name: str, kind: int, content: bytes, count: int, **changes: Any) -> Column:
    """A column of `count` values that are all there."""
    page = Page(levels(run(1, count, 1)) + content, count)
    return replace(Column(name, kind, (page,)), **changes)


def listed(name: str, content: bytes, rows: int, each: int, encoding: int = PLAIN) -> Column:
    """A column of `rows` lists of `each` whole numbers of 64 bits."""
    repeated = b"".join(run(0, 1, 1) + run(1, each - 1, 1) for _ in range(rows))
    count = rows * each
    page = Page(levels(repeated) + levels(run(3, count, 2)) + content, count, encoding)
    return Column(name, INT64, (page,), listed=True)


def dictionary(content: bytes, values: int) -> Page:
    return Page(content, values, PLAIN, dictionary=True)


def repeated(name: str, rows: int, each: int, value: int = 1) -> Column:
    """Lists that repeat one number, which a dictionary has: a few bytes for any number of them."""
    data = listed(name, bytes([1]) + run(0, rows * each, 1), rows, each, RLE_DICTIONARY).pages[0]
    return Column(name, INT64, (dictionary(value.to_bytes(8, "little"), 1), data), listed=True)
