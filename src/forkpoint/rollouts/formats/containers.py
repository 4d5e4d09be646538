"""Files of records: JSON lines, parquet, safetensors and torch files, told by content.

Each gives the tables or samples that it holds, with where each stands.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.formats import parquet
from forkpoint.rollouts.formats.json_lines import COMPRESSED, json_lines, parse_object
from forkpoint.rollouts.formats.limits import MemoryLimit
from forkpoint.rollouts.formats.record import RecordError
from forkpoint.rollouts.formats.tensors import (
    ZIP_MAGIC,
    read_safetensors,
    read_torch,
    refuse_pickle,
)

Part = tuple[str, Mapping[str, Any] | RecordError]
"""Where something stands, and what it is, or why it cannot be read."""

SHARED = "meta_info"
"""A key under which a table has what its samples share."""
_PICKLE_MAGICS = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
_TORCH_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19"
"""Bytes that files of torch before 1.6 hold near their beginning."""
_MOST_LISTS = 8
"""How deeply samples or batches may lie in lists of lists."""


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
    if head.startswith(parquet.MAGIC):
        return "parquet"
    if head.startswith(ZIP_MAGIC) or (head.startswith(_PICKLE_MAGICS) and _TORCH_MAGIC in head):
        return "torch"
    if head.startswith(_PICKLE_MAGICS) or path.suffix in (".pkl", ".pickle"):
        raise refuse_pickle(path)
    if path.suffix == ".safetensors":
        raise RolloutError(
            f"{path} is no safetensors file, or cut short: its header would have {length} bytes, "
            f"and the file has {path.stat().st_size}. Copy or write the file again."
        )
    if path.suffix in (".parquet", ".pt", ".pth"):
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
    if b"\0" in head and not head.startswith(COMPRESSED):
        raise RolloutError(
            f"{path} is of no kind that is read: it begins with {short(head[:8])}. Give JSON lines "
            "(plain, gzip or zstd), parquet, safetensors or a torch file."
        )
    return "JSON lines"


def parts(path: Path, container: str, memory: MemoryLimit) -> Iterator[Part]:
    """Contents of a file, in its order.

    Raises RolloutError, naming the file, where the file as a whole cannot be read, or takes more
    memory than is left.
    """
    if container == "JSON lines":
        yield from _json(path, memory)
    elif container == "parquet":
        yield from parquet.rows(path, memory)
    elif container == "safetensors":
        yield str(path), read_safetensors(path)
    else:
        yield from _tables(read_torch(path, memory), str(path), 0)


def _json(path: Path, memory: MemoryLimit) -> Iterator[Part]:
    for number, line in json_lines(path, memory):
        where = f"{path}, line {number}"
        try:
            record: Mapping[str, Any] | RecordError = parse_object(line, where)
        except RolloutError as error:
            record = RecordError.of(error, "JSON")
        yield where, record


def _tables(value: Any, where: str, depth: int) -> Iterator[Part]:
    """The tables or samples in what was loaded: one, several in a list, or under known keys."""
    samples = value.get("samples") if isinstance(value, Mapping) else value
    if isinstance(samples, list):
        if depth == _MOST_LISTS:
            yield where, RecordError(where, "record", "lies in too many lists of lists.")
            return
        for n, item in enumerate(samples):
            yield from _tables(item, f"{where}, item {n}", depth + 1)
    elif isinstance(value, Mapping) and isinstance(value.get("rollout_data"), Mapping):
        yield where, value["rollout_data"]  # slime's train data, before it wrote samples
    elif isinstance(value, Mapping) and isinstance(value.get("batch"), Mapping):
        yield where, _batch(value, where)
    elif isinstance(value, Mapping):
        yield where, value
    else:
        yield (
            where,
            RecordError(where, "record", f"is {short(value)}; a batch is a dict of its fields."),
        )


def _batch(value: Mapping[str, Any], where: str) -> Mapping[str, Any] | RecordError:
    """The fields of a batch whose tensors, arrays and settings are apart, as verl's are."""
    found: dict[str, Any] = {}
    for name in (SHARED, "batch", "non_tensor_batch"):
        fields = value.get(name)
        if fields is not None and not isinstance(fields, Mapping):
            message = f"{name} is {short(fields)}; it takes a dict of the batch's fields."
            return RecordError(where, name, message)
        found |= fields or {}
    return found
