"""Files of records: JSON lines, parquet, safetensors, torch files and pickles, told by content.

Each gives the tables or samples that it holds, with where each stands. Imports no torch, and
pyarrow only for parquet.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.rollout_files import json_lines, parse_object
from forkpoint.rollouts import short
from forkpoint.traces.record import RecordError

Part = tuple[str, Mapping[str, Any] | RecordError]
"""Where something stands, and what it is, or why it cannot be read."""

SHARED = "meta_info"
"""A key under which a table has what its samples share."""
_PARQUET_MAGIC = b"PAR1"
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_MAGICS = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""Text, though no JSON lines; the reader of lines says what to do."""
_TORCH_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19"
"""What files of torch before 1.6 hold near their beginning."""
_ROWS = 1024


def container_of(path: Path) -> str:
    """Which kind of file it is, from its first bytes.

    Raises RolloutError where it is missing, empty, a folder, or of a kind that is refused.
    """
    if not path.exists():
        raise RolloutError(f"{path} does not exist. Give the path of a file of rollouts.")
    if path.is_dir():
        raise RolloutError(
            f"{path} is a directory. Give the path of one file of rollouts in it, or the folder of "
            "a recorded trace."
        )
    if not path.is_file():
        raise RolloutError(
            f"{path} is a pipe or a device, of which nothing can be read twice, and files are: to "
            "see of which kind they are, and then for the rollouts. Write it to a file first."
        )
    with path.open("rb") as file:
        head = file.read(64)
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and 2 <= length <= path.stat().st_size:
        return "safetensors"
    if head.startswith(_PARQUET_MAGIC):
        return "parquet"
    if head.startswith(_ZIP_MAGIC):
        return "torch"
    if head.startswith(_PICKLE_MAGICS):
        return "torch" if _TORCH_MAGIC in head else "pickle"
    if path.suffix == ".safetensors":
        raise RolloutError(
            f"{path} is no safetensors file, or cut short: its header would have {length} bytes, "
            f"and the file has {path.stat().st_size}. Copy or write the file again."
        )
    if path.suffix in (".parquet", ".pt", ".pth", ".pkl", ".pickle"):
        raise RolloutError(
            f"{path} is no {path.suffix[1:]} file: it begins with {short(head[:8])}. Copy or write "
            "the file again."
        )
    if path.suffix == ".bin":
        raise RolloutError(
            f"{path}: binary transport files (prime-rl's msgpack) have no names of fields, and "
            "their order changes between versions. Decode them with the trainer's own classes and "
            "write each sample as one JSON object a line with msgspec.structs.asdict."
        )
    if b"\0" in head and not head.startswith((*_COMPRESSED, *_UTF_16)):
        raise RolloutError(
            f"{path} is of no kind that is read: it begins with {short(head[:8])}. Give JSON lines "
            "(plain, gzip or zstd), parquet, safetensors, a torch file or a pickle."
        )
    return "JSON lines"


def parts(path: Path, container: str) -> Iterator[Part]:
    """What a file holds, in its order.

    Raises RolloutError, naming the file, where the file as a whole cannot be read.
    """
    if container == "JSON lines":
        yield from _json(path)
    elif container == "parquet":
        yield from _parquet(path)
    elif container == "safetensors":
        yield str(path), _safetensors(path)
    else:
        from forkpoint.traces.pickles import load_pickle, load_torch

        loaded = load_torch(path, str(path)) if container == "torch" else load_pickle(path)
        yield from _tables(loaded, str(path))


def _json(path: Path) -> Iterator[Part]:
    for number, line in json_lines(path):
        where = f"{path}, line {number}"
        try:
            yield where, parse_object(line, where)
        except RolloutError as error:
            yield where, RecordError.of(error, "JSON")


def _tables(value: Any, where: str) -> Iterator[Part]:
    """The tables or samples in what was loaded: one, several in a list, or under known keys."""
    if isinstance(value, list):
        for n, item in enumerate(value):
            yield from _tables(item, f"{where}, item {n}")
    elif isinstance(value, Mapping) and isinstance(value.get("samples"), list):
        yield from _tables(value["samples"], where)
    elif isinstance(value, Mapping) and isinstance(value.get("rollout_data"), Mapping):
        yield where, value["rollout_data"]  # slime's train data, before it wrote samples
    elif isinstance(value, Mapping) and isinstance(value.get("batch"), Mapping):
        table: dict[str, Any] = {}
        for name in (SHARED, "batch", "non_tensor_batch"):
            part = value.get(name)
            if part is not None and not isinstance(part, Mapping):
                message = f"{name} is {short(part)}; it takes a dict of the batch's fields."
                yield where, RecordError(where, name, message)
                return
            table.update(part or {})
        yield where, table
    elif isinstance(value, Mapping):
        yield where, value
    else:
        yield (
            where,
            RecordError(where, "record", f"is {short(value)}; a batch is a dict of its fields."),
        )


def _safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, deserialize

    try:
        entries = deserialize(path.read_bytes())
    except (SafetensorError, ValueError) as error:
        raise RolloutError(
            f"{path} is no whole safetensors file: {error}. Copy or write the file again."
        ) from None
    return {name: _tensor(path, name, entry) for name, entry in entries}


_DTYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "U16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "I64": "<i8",
    "U64": "<u8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
}


def _tensor(path: Path, name: str, entry: Mapping[str, Any]) -> np.ndarray:
    dtype, shape, raw = entry["dtype"], entry["shape"], bytes(entry["data"])
    if dtype == "BF16":
        wide = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    if dtype not in _DTYPES:
        raise RolloutError(
            f"{path}: {name} has dtype {dtype}; allowed are BF16, {', '.join(_DTYPES)}."
        )
    return np.frombuffer(raw, _DTYPES[dtype]).reshape(shape)


def _parquet(path: Path) -> Iterator[Part]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(
            f"{path} is a parquet file, which takes pyarrow to read. Install it: "
            "pip install 'forkpoint[parquet]'."
        ) from None
    row = 0
    try:
        with ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise RolloutError(
                    f"{path} has the column {short(twice)} more than once. Write it with one "
                    "column of each name."
                )
            for batch in file.iter_batches(batch_size=_ROWS):
                columns = [_column(column) for column in batch.columns]
                for values in zip(*columns, strict=True):
                    yield f"{path}, row {row}", dict(zip(names, values, strict=True))
                    row += 1
    except RolloutError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise RolloutError(
            f"{path} cannot be read as parquet, after {row} rows: {short(str(error))}. Copy or "
            "write the file again."
        ) from None


def _column(column: Any) -> list[Any]:
    """The values of a column by row: arrays where rows are lists of numbers."""
    from pyarrow import types

    kind = column.type
    listed = types.is_list(kind) or types.is_large_list(kind)
    if not listed or not (
        types.is_integer(kind.value_type)
        or types.is_floating(kind.value_type)
        or types.is_boolean(kind.value_type)
    ):
        return column.to_pylist()
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths)
    flat = column.flatten().to_numpy(zero_copy_only=False)
    rows: list[Any] = np.split(flat, ends[:-1].tolist()) if len(ends) else []
    missing = column.is_null().to_numpy(zero_copy_only=False)
    return [None if lost else row for row, lost in zip(rows, missing, strict=True)]
