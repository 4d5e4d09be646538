"""Parquet files, row by row, in memory that is checked before a row group is decompressed.

Dictionaries stay dictionaries: a value that a million rows repeat is one object. Imports no torch;
pyarrow is imported when a file is read.
"""

import itertools
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.formats.limits import KIB, MemoryLimit
from forkpoint.formats.parquet_pages import (
    DATA_PAGE,
    DATA_PAGE_V2,
    DELTA_BYTE_ARRAY,
    DICTIONARY_ENCODINGS,
    DICTIONARY_PAGE,
    Page,
    pages,
    schema_elements,
)
from forkpoint.rollouts import short

MAGIC = b"PAR1"
_ROWS = 1024
"""Rows that are decoded at a time, at most."""
_TAIL_BYTES = 8
_FEW_COLUMNS = 1_000
_BUFFER_BYTES = 1 << 16
_BUNDLE_BYTES = 1 << 25
# Measured with pyarrow 26: 2.2 KiB an element of a schema to open a file, and 6 KiB a column to
# read a row group.
_ELEMENT_BYTES = 3 * KIB
_COLUMN_BYTES = 8 * KIB
_FOOTER_TIMES = 32
# Two levels of 16 bits besides each value, in buffers that grow by doubling.
_LEVELS_BYTES = 4
_GROWTH = 2
# A value as a Python object in a list, for each list or struct around it.
_OBJECT_BYTES = 64
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}


def rows(path: Path, memory: MemoryLimit) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a file, each with where it stands.

    Raises RolloutError, naming the file, where it cannot be read or takes more memory than it may,
    and ConfigError where pyarrow is missing.
    """
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(
            f"{path} is a parquet file, which takes pyarrow to read. Install it: "
            "pip install 'forkpoint[parquet]'."
        ) from None
    row = 0
    try:
        with path.open("rb") as opened:
            content = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        with memory.holding(_footer_bytes(content), "its metadata"):
            for record in _File(path, content, memory).records():
                yield f"{path}, row {row}", record
                row += 1
    except RolloutError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise RolloutError(
            f"{path} cannot be read as parquet, after {row} rows: {short(str(error))}. Copy or "
            "write the file again."
        ) from None


def _footer_bytes(content: memoryview) -> int:
    """Bytes of the metadata once pyarrow has read it."""
    if len(content) < 2 * _TAIL_BYTES or content[-4:] != MAGIC:
        raise ValueError("it does not end as parquet does")
    length = int.from_bytes(content[-8:-4], "little")
    if length > len(content) - _TAIL_BYTES:
        raise ValueError(f"its metadata would have {length} bytes, and it has {len(content)}")
    footer = content[len(content) - _TAIL_BYTES - length : len(content) - _TAIL_BYTES]
    return _FOOTER_TIMES * length + _ELEMENT_BYTES * schema_elements(footer)


def _named(groups: list[int]) -> str:
    return f"row group {groups[0]}" if len(groups) == 1 else f"row groups {groups[0]} and on"


class _File:
    def __init__(self, path: Path, content: memoryview, memory: MemoryLimit) -> None:
        from pyarrow.parquet import ParquetFile

        self.path, self.content, self.memory = path, content, memory
        with ParquetFile(path) as first:
            self.metadata: Any = first.metadata
            names = first.schema_arrow.names
        if not names:
            raise RolloutError(f"{path} has no columns. Look at what wrote it.")
        if len(set(names)) < len(names):
            seen: set[str] = set()
            twice = next(name for name in names if name in seen or seen.add(name))
            raise RolloutError(
                f"{path} has the column {short(twice)} more than once. Write it with one "
                "column of each name."
            )
        schema = self.metadata.schema
        self.names: list[str] = names
        self.leaves: list[Any] = [schema.column(n) for n in range(len(schema))]
        texts = [leaf.path for leaf in self.leaves if leaf.physical_type == "BYTE_ARRAY"]
        self.open: Any = lambda: ParquetFile(
            path,
            metadata=self.metadata,
            read_dictionary=texts,
            pre_buffer=False,
            buffer_size=_BUFFER_BYTES if len(self.leaves) <= _FEW_COLUMNS else 0,
            page_checksum_verification=True,
        )

    def records(self) -> Iterator[Mapping[str, Any]]:
        read = given = 0
        with self.open() as file:
            for groups, needed in self._bundles():
                for number in groups:
                    decoded, stored = self._sizes[number]
                    read, given = read + stored, given + decoded
                self.memory.check_inflation(read, given, "values")
                with self.memory.holding(needed, f"{_named(groups)}, decompressed,"):
                    for batch in file.iter_batches(
                        batch_size=_ROWS, row_groups=groups, use_threads=False
                    ):
                        named = zip(self.names, batch.columns, strict=True)
                        columns = [self._column(name, column) for name, column in named]
                        for values in zip(*columns, strict=True):
                            yield dict(zip(self.names, values, strict=True))

    def _bundles(self) -> Iterator[tuple[list[int], int]]:
        """Row groups that are read together, small ones several at a time, and the bytes that they
        need at most."""
        held: list[int] = []
        rows = needed = 0
        self._sizes: dict[int, tuple[int, int]] = {}
        for number in range(self.metadata.num_row_groups):
            group = self.metadata.row_group(number)
            if not group.num_rows:
                continue
            more, *sizes = self._needed(number, group)
            if held and (needed + more > _BUNDLE_BYTES or rows >= _ROWS):
                yield held, needed
                held, rows, needed = [], 0, 0
                self._sizes.clear()
            self._sizes[number] = sizes[0], sizes[1]
            held.append(number)
            rows, needed = rows + group.num_rows, needed + more
        if held:
            yield held, needed

    def _column(self, name: str, column: Any) -> list[Any]:
        try:
            return values_of(column)
        except Exception as error:  # pyarrow's are of many kinds where Python has no such value
            raise RolloutError(
                f"{self.path}: the column {short(name)} of {short(str(column.type))} cannot be "
                f"read: {short(str(error))}. Write it as numbers, text, or lists of these."
            ) from None

    def _needed(self, number: int, group: Any) -> tuple[int, int, int]:
        """Bytes that a row group needs at most to be read, bytes of the values that it gives in
        all, and bytes that it has in the file."""
        needed = decoded = stored = 0
        for leaf, at in zip(self.leaves, range(group.num_columns), strict=True):
            chunk = group.column(at)
            begin, size = chunk.data_page_offset, chunk.total_compressed_size
            if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < begin:
                begin = chunk.dictionary_page_offset
            if begin < 0 or size < 0 or begin + size > len(self.content):
                raise ValueError(f"{leaf.path} of row group {number} lies outside the file")
            found = list(pages(self.content, begin, begin + size))
            _check_dictionary(leaf, found)
            cost = _cost(leaf, found, group.num_rows)
            needed, decoded, stored = needed + cost[0], decoded + cost[1], stored + size
        if stored > self.memory.disk_bytes:
            raise ValueError(f"the columns of row group {number} overlap")
        return needed, decoded, stored


def _check_dictionary(leaf: Any, found: list[Page]) -> None:
    """Raises ValueError where a dictionary declares more values than it has bytes for."""
    width = _WIDTHS.get(leaf.physical_type, 4)  # text has its length before it
    if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY":
        width = max(1, leaf.length)
    for page in found:
        if page.kind == DICTIONARY_PAGE and page.values * width > page.content_bytes:
            raise ValueError(
                f"the dictionary of {leaf.path} declares {page.values} values in "
                f"{page.content_bytes} bytes"
            )


def _cost(leaf: Any, found: list[Page], count: int) -> tuple[int, int]:
    """Bytes to decode a column of a row group of `count` rows by batches, and bytes of all of its
    values."""
    data = [page for page in found if page.kind in (DATA_PAGE, DATA_PAGE_V2)]
    dictionary = sum(page.content_bytes for page in found if page.kind == DICTIONARY_PAGE)
    if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY":
        width = leaf.length
    else:
        width = _WIDTHS.get(leaf.physical_type, 4)  # of an index into a dictionary, else
    listed = leaf.max_repetition_level
    numbers = listed == 1 and leaf.physical_type in _WIDTHS
    objects = 0 if numbers else _OBJECT_BYTES * (1 + leaf.max_definition_level)
    sizes = [_page_bytes(leaf, page, _GROWTH * (width + _LEVELS_BYTES) + objects) for page in data]
    # Rows of a list may be of any length, so all of them may lie in one batch.
    most = sum(sizes) if listed else _window(data, sizes)
    largest = max((page.content_bytes for page in data), default=0)
    batches = -(-count // _ROWS) if leaf.physical_type == "BYTE_ARRAY" else 1
    values = sum(page.values for page in data)
    decoded = batches * dictionary + values * (width if numbers else _OBJECT_BYTES)
    return _COLUMN_BYTES + 3 * dictionary + 2 * largest + most, decoded


def _page_bytes(leaf: Any, page: Page, each: int) -> int:
    """Bytes that the values of a page take, `each` besides what they hold."""
    count = each * page.values
    if leaf.physical_type == "BYTE_ARRAY" and page.encoding not in DICTIONARY_ENCODINGS:
        # As bytes, and as text, of which a character takes up to 4.
        count += 5 * page.content_bytes
        if page.encoding == DELTA_BYTE_ARRAY:  # every value may begin with all of the one before
            count += 5 * page.content_bytes * page.values
    return count


def _window(data: list[Page], sizes: list[int]) -> int:
    """The most bytes of pages that one batch of _ROWS values reaches into."""
    most = held = values = first = 0
    for page, size in zip(data, sizes, strict=True):
        held, values = held + size, values + page.values
        # What is left without the first page still covers a batch that begins in it.
        while values - data[first].values >= _ROWS + page.values:
            held, values, first = held - sizes[first], values - data[first].values, first + 1
        most = max(most, held)
    return most


def values_of(column: Any) -> list[Any]:
    """The values of an Arrow array: numpy arrays where they are lists of numbers, and one object
    for what a dictionary repeats."""
    from pyarrow import types

    kind = column.type
    if types.is_dictionary(kind):
        used, which = np.unique(_array(column.indices.fill_null(0)), return_inverse=True)
        texts = column.dictionary.take(_arrow(used)).to_pylist() if len(column.dictionary) else []
        missing = _array(column.is_null())
        return [
            None if lost else texts[at]
            for at, lost in zip(which.tolist(), missing.tolist(), strict=True)
        ]
    if types.is_struct(kind):
        names = [field.name for field in kind]
        if len(set(names)) < len(names):
            raise ValueError(f"it has two fields of one name among {short(names)}")
        fields = [values_of(field) for field in column.flatten()]
        missing = _array(column.is_null()).tolist()
        rows = zip(*fields, strict=True) if fields else ((),) * len(column)
        return [
            None if lost else dict(zip(names, row, strict=True))
            for row, lost in zip(rows, missing, strict=True)
        ]
    if types.is_map(kind):
        pairs = list(zip(values_of(column.keys), values_of(column.items), strict=True))
        ends = column.offsets.to_numpy().tolist()
        return _rows(pairs, ends, column)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _lists(column)
    return column.to_pylist()


def _lists(column: Any) -> list[Any]:
    from pyarrow import types

    if types.is_fixed_size_list(column.type):
        lengths = np.where(_array(column.is_null()), 0, column.type.list_size)
    else:
        lengths = _array(column.value_lengths().fill_null(0))
    ends = [0, *np.cumsum(lengths).tolist()]
    flat = column.flatten()
    items = flat.type
    numbers = types.is_integer(items) or types.is_floating(items) or types.is_boolean(items)
    return _rows(_array(flat) if numbers else values_of(flat), ends, column)


def _rows(items: Any, ends: list[int], column: Any) -> list[Any]:
    """The items of each row, None for what is missing; row n ends at `ends[n + 1]`."""
    missing = _array(column.is_null()).tolist()
    return [
        None if lost else items[begin:end]
        for (begin, end), lost in zip(itertools.pairwise(ends), missing, strict=True)
    ]


def _array(values: Any) -> np.ndarray:
    return values.to_numpy(zero_copy_only=False)


def _arrow(values: np.ndarray) -> Any:
    from pyarrow import array

    return array(values)
