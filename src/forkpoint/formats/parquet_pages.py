"""Sizes that the pages of a parquet file declare, read from their headers before any is
decompressed.

The metadata at the end of a file says how many values a column has and how many bytes they take,
but a reader allocates by the headers of the pages, which may say something else. Headers are
structs in Thrift's compact protocol: https://parquet.apache.org/docs/file-format/data-pages.
Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DATA_PAGE, _INDEX_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = range(4)
DICTIONARY_ENCODINGS = (2, 8)
DELTA_BYTE_ARRAY = 7
_COUNTS = {DATA_PAGE: 5, DICTIONARY_PAGE: 7, DATA_PAGE_V2: 8}
"""The field of a header that has the counts of each kind of page."""
_MOST_DEPTH = 8
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)


@dataclass(frozen=True, slots=True)
class Page:
    """A page as its header declares it.

    kind: DATA_PAGE, DATA_PAGE_V2 or DICTIONARY_PAGE; others hold no values.
    content_bytes: what it takes when it is decompressed.
    values: how many values it has, nulls and empty lists included.
    encoding: of its values, by the number that the format gives it.
    """

    kind: int
    content_bytes: int
    values: int
    encoding: int


def pages(content: memoryview, begin: int, end: int) -> Iterator[Page]:
    """The pages of a column that lies at bytes `begin` to `end` of a file.

    Raises ValueError, saying where, for what is no header of a page.
    """
    while begin < end:
        at = begin
        try:
            header, begin = _struct(content, at, end, 0)
            kind, content_bytes, stored = header[1], header[2], header[3]
            counts = header.get(_COUNTS.get(kind, 0), {})
            encoding = counts.get(4 if kind == DATA_PAGE_V2 else 2, 0)
            values = counts.get(1, 0)
        except (KeyError, IndexError, AttributeError):
            raise ValueError(f"there is no header of a page at byte {at}") from None
        numbers = (kind, content_bytes, stored, values, encoding)
        if any(type(n) is not int or n < 0 for n in numbers) or stored > end - begin:
            raise ValueError(f"the header of the page at byte {at} is wrong")
        yield Page(kind, content_bytes, values, encoding)
        begin += stored


def schema_elements(footer: memoryview) -> int:
    """How many elements the schema of a file has, by the metadata at its end.

    Raises ValueError for what is no such metadata.
    """
    try:
        at, field = 0, 0
        while footer[at]:
            field, kind, at = _field(footer, at, field)
            if field == 2 and kind == _LIST:
                return _list_header(footer, at)[0]
            at = _value(footer, at, len(footer), kind, 0)[1]
    except (IndexError, ValueError):
        pass
    raise ValueError("its metadata has no schema")


def _struct(content: memoryview, at: int, end: int, depth: int) -> tuple[dict[int, Any], int]:
    """The fields of a struct by their numbers, and the byte after it."""
    if depth > _MOST_DEPTH:
        raise ValueError(f"structs are nested too deeply at byte {at}")
    found: dict[int, Any] = {}
    field = 0
    while content[at]:
        field, kind, at = _field(content, at, field)
        found[field], at = _value(content, at, end, kind, depth)
        if at >= end:
            raise IndexError
    return found, at + 1


def _field(content: memoryview, at: int, before: int) -> tuple[int, int, int]:
    """The number and type of the field whose header stands at `at`, and the byte after that."""
    head = content[at]
    if head >> 4:
        return before + (head >> 4), head & 15, at + 1
    number, at = _varint(content, at + 1)
    return number >> 1, head & 15, at


def _value(content: memoryview, at: int, end: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind == _BYTE:
        return content[at], at + 1
    if kind in (_I16, _I32, _I64):
        number, at = _varint(content, at)
        return (number >> 1) ^ -(number & 1), at
    if kind == _DOUBLE:
        return None, at + 8
    if kind == _BINARY:
        length, at = _varint(content, at)
        return None, at + length
    if kind == _STRUCT:
        return _struct(content, at, end, depth + 1)
    if kind in (_LIST, _SET):
        count, item, at = _list_header(content, at)
        for _ in range(count):
            if at >= end:
                raise IndexError
            # A boolean of a list takes a byte of its own.
            at = at + 1 if item in (_TRUE, _FALSE) else _value(content, at, end, item, depth + 1)[1]
        return None, at
    raise ValueError(f"byte {at} is of no type that a header has")


def _list_header(content: memoryview, at: int) -> tuple[int, int, int]:
    """How many items a list has, their type, and the byte after that."""
    head = content[at]
    if head >> 4 < 15:
        return head >> 4, head & 15, at + 1
    count, at = _varint(content, at + 1)
    return count, head & 15, at


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = content[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number before byte {at} has no end")
