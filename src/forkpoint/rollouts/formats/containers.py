"""Files of records: JSON lines, parquet, safetensors and torch files, recognised by content.

Each reader yields the tables or samples of a file with their positions.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.disk import PIXELS
from forkpoint.rollouts.formats import parquet, tensors
from forkpoint.rollouts.formats.json_lines import COMPRESSED, json_lines, parse_object
from forkpoint.rollouts.formats.limits import MemoryLimit
from forkpoint.rollouts.formats.record import SHARED, RecordError

Part = tuple[str, Mapping[str, Any] | RecordError]
"""Position of a value in a file, and the value, or the error of reading it."""
_PICKLE_MAGICS = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
_MOST_LISTS = 8
"""Largest depth of lists of lists around samples or batches."""


def container_of(path: Path) -> str:
    """Find the kind of a file by its first bytes.

    Raises RolloutError if the file is missing, a folder, or of a refused kind.
    """
    if not path.is_file():
        what = "does not exist"
        if path.is_dir():
            what = "is a directory"
        elif path.exists():
            what = "is a pipe or a device, and files are read more than once"
        raise RolloutError(
            f"{path} {what}. Give the path of a file of rollouts, or the folder of a trace."
        )
    if path.name.endswith(PIXELS):
        raise RolloutError(
            f"{path} has pixels of rollouts, but no rollouts. Give the file of the rollouts, "
            f"{path.name.removesuffix(PIXELS)}."
        )
    with path.open("rb") as file:
        head = file.read(64)
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and 2 <= length <= path.stat().st_size:
        return "safetensors"
    if head.startswith(parquet.MAGIC):
        return "parquet"
    if head.startswith(tensors.ZIP_MAGIC):
        return "torch"
    if head.startswith(_PICKLE_MAGICS) or path.suffix in (".pkl", ".pickle"):
        raise tensors.refuse_pickle(path)
    known = path.suffix in (".safetensors", ".parquet", ".pt", ".pth")
    if known or (b"\0" in head and not head.startswith(COMPRESSED)):
        first = head.find(0)
        later = f" and has a NUL byte at position {first}" if first >= 8 else ""
        raise RolloutError(
            f"{path} has an unknown file type, or is truncated: it begins with {short(head[:8])}"
            f"{later}. Give JSON lines (plain, gzip or zstd), parquet, safetensors or a torch file."
        )
    return "JSON lines"


def parts(path: Path, container: str, memory: MemoryLimit) -> Iterator[Part]:
    """Yield the contents of a file in order.

    Raises RolloutError, naming the file, if the file as a whole cannot be read, or exceeds the
    memory limit.
    """
    if container == "parquet":
        yield from parquet.rows(path, memory)
    elif container == "safetensors":
        yield str(path), tensors.read_safetensors(path)
    elif container == "torch":
        yield from _tables(tensors.read_torch(path, memory), str(path), 0)
    else:
        for number, line in json_lines(path, memory):
            where = f"{path}, line {number}"
            try:
                found: Mapping[str, Any] | RecordError = parse_object(line, where)
            except RolloutError as error:
                found = RecordError(str(error), "JSON")
            yield where, found


def _tables(value: Any, where: str, depth: int) -> Iterator[Part]:
    """The tables or samples in a loaded value: one, several in a list, or under known keys."""
    found = value.get("samples") if isinstance(value, Mapping) else value
    if isinstance(found, list) and depth < _MOST_LISTS:
        for n, item in enumerate(found):
            yield from _tables(item, f"{where}, item {n}", depth + 1)
        return
    if not isinstance(value, Mapping):
        message = f"{where}: is {short(value)}; a batch is a dict of its fields."
        yield where, RecordError(message, "record")
        return
    for name in ("rollout_data", "batch"):  # keys of slime's older train data, and of verl
        if isinstance(value.get(name), Mapping):
            table: dict[str, Any] = {}
            for part in (name, SHARED, "non_tensor_batch"):
                fields = {} if value.get(part) is None else value[part]
                if not isinstance(fields, Mapping):
                    message = f"{where}: {part} is {short(fields)}; it takes a dict of fields."
                    yield where, RecordError(message, part)
                    return
                table |= fields
            yield where, table
            return
    yield where, value
