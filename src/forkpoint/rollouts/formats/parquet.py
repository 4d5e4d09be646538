"""Reader of parquet files, by batches of rows. pyarrow is imported when a file is read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.files import import_extra
from forkpoint.rollouts.formats.limits import MemoryLimit

MAGIC = b"PAR1"
_ROWS = 64
"""Number of rows that are decoded at a time."""
_VALUE_BYTES = 16
"""Bytes of a value while it is decoded: 64 bits, its depth in lists, and a copy of both."""


def rows(path: Path, memory: MemoryLimit) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a file with their positions.

    Raises RolloutError, naming the file, if it cannot be read or declares row groups that exceed
    the memory limit, and ConfigError if pyarrow is missing.
    """
    import_extra("pyarrow", "parquet", f"{path} is a parquet file, which")
    from pyarrow.parquet import ParquetFile

    row = 0
    try:
        with ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            if twice := [name for name in names if names.count(name) > 1]:
                raise RolloutError(
                    f"{path} has the column {short(twice[0])} more than once. Write it with one "
                    "column of each name."
                )
            for number in range(file.num_row_groups):
                memory.check(
                    _declared_bytes(file.metadata.row_group(number)), f"row group {number}"
                )
                for batch in file.iter_batches(_ROWS, [number], use_threads=False):
                    memory.check(batch.nbytes, f"a part of row group {number}")
                    for values in zip(*map(_values, batch.columns), strict=True):
                        yield f"{path}, row {row}", dict(zip(names, values, strict=True))
                        row += 1
    except (RolloutError, MemoryError):
        raise
    except Exception as error:  # pyarrow's are of many kinds, also where Python has no such value
        raise RolloutError(
            f"{path} cannot be read as parquet, after {row} rows: {short(str(error))}. Write it "
            "again, with columns of numbers, text, or lists of these."
        ) from None


def _declared_bytes(group: Any) -> int:
    """Decoded bytes of the columns of a row group, from its metadata."""
    columns = [group.column(at) for at in range(group.num_columns)]
    return sum(max(0, c.total_uncompressed_size) + _VALUE_BYTES * c.num_values for c in columns)


def _values(column: Any) -> list[Any]:
    """Values of an Arrow array. Lists of numbers are numpy arrays."""
    from pyarrow import types

    kind = column.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = kind.value_type
        if types.is_integer(item) or types.is_floating(item) or types.is_boolean(item):
            cells = [cell.values for cell in column]
            return [None if c is None else c.to_numpy(zero_copy_only=False) for c in cells]
    return column.to_pylist()
