"""The safetensors format, read strictly: what a header declares is checked before it is used.

Arrays are views of the content, which may be a mapped file, so that reading takes no memory besides
the header's. Format: https://huggingface.co/docs/safetensors. Imports no torch.
"""

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.formats.json_lines import parse_strictly
from forkpoint.formats.limits import MemoryLimit, json_bytes, shown
from forkpoint.rollouts import short

LENGTH_BYTES = 8
"""The length of the header stands before it, little-endian."""
DTYPES: dict[str, str] = {
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
BFLOAT16 = "BF16"
_METADATA = "__metadata__"
_MOST_DIMENSIONS = 32
_MOST_ENTRIES = 2**48
_KEYS = {"dtype", "shape", "data_offsets"}

Content = NDArray[np.uint8]
Arrays = dict[str, NDArray[Any]]


def open_tensors(path: Path, memory: MemoryLimit) -> Arrays:
    """The arrays of a safetensors file, mapped; bfloat16 as float32, which is charged for good.

    Raises RolloutError, naming the file, where it is not as the format has it.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return decode(np.frombuffer(mapped, np.uint8), memory)[0]
    except ValueError as error:
        if isinstance(error, RolloutError):
            raise
        raise RolloutError(
            f"{path} is no whole safetensors file: {error}. Copy or write the file again."
        ) from None


def decode(content: Content, memory: MemoryLimit) -> tuple[Arrays, dict[str, str]]:
    """The arrays of a safetensors file's content, and its metadata.

    Raises ValueError, saying what is wrong, for content that is not as the format has it, and
    RolloutError where the header takes more memory than it may.
    """
    size = len(content)
    if size < LENGTH_BYTES:
        raise ValueError(f"it has {size} bytes, and a header's length alone has {LENGTH_BYTES}")
    length = int.from_bytes(content[:LENGTH_BYTES].tobytes(), "little")
    if length > size - LENGTH_BYTES:
        raise ValueError(f"its header would have {length} bytes, and the file has {size}")
    if length > memory.left_bytes:
        raise memory.refusal(length, "the header")
    header = content[LENGTH_BYTES : LENGTH_BYTES + length].tobytes()
    with memory.holding(json_bytes(header), "the header"):
        return _arrays(content[LENGTH_BYTES + length :], _parsed(header), memory)


def _parsed(header: bytes) -> dict[str, Any]:
    try:
        parsed = parse_strictly(header)
    except ValueError as error:
        raise ValueError(f"its header is not JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"its header is {short(parsed)}, not an object of tensors by name")
    return parsed


def _arrays(
    data: Content, header: dict[str, Any], memory: MemoryLimit
) -> tuple[Arrays, dict[str, str]]:
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"its {_METADATA} is {short(metadata)}, not an object of texts by name")
    placed = [(_entry(name, entry, len(data)), name) for name, entry in header.items()]
    end = 0
    for (begin, stop, *_), name in sorted(placed, key=lambda item: item[0][:2]):
        if begin != end:
            raise ValueError(
                f"data_offsets of {short(name)} begin at {begin}, and those before end at {end}: "
                "tensors lie one after another"
            )
        end = stop
    if end != len(data):
        raise ValueError(f"its tensors have {end} bytes, and {len(data)} follow the header")
    return {
        name: _array(data[begin:stop], dtype, shape, name, memory)
        for (begin, stop, dtype, shape), name in placed
    }, metadata


def _entry(name: str, entry: Any, size: int) -> tuple[int, int, str, list[int]]:
    """Where a tensor begins and ends, its dtype and its shape, as the header declares them."""
    if not isinstance(entry, Mapping) or entry.keys() != _KEYS:
        raise ValueError(f"{short(name)} is {short(entry)}, and takes {', '.join(sorted(_KEYS))}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in (BFLOAT16, *DTYPES):
        raise ValueError(
            f"{short(name)} has dtype {short(dtype)}; allowed are {BFLOAT16}, {', '.join(DTYPES)}"
        )
    if not _counts(shape) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{short(name)} has the invalid shape {short(shape)}")
    if not _counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        raise ValueError(
            f"{short(name)} has data_offsets {short(offsets)}, and {size} bytes follow the header"
        )
    width = 2 if dtype == BFLOAT16 else np.dtype(DTYPES[dtype]).itemsize
    entries = math.prod(shape)
    if entries * width != offsets[1] - offsets[0]:
        raise ValueError(
            f"invalid shape of {short(name)}: {short(shape)} of {dtype} has {short(entries)} x "
            f"{width} bytes, and data_offsets have {offsets[1] - offsets[0]}"
        )
    if math.prod(max(1, length) for length in shape) > _MOST_ENTRIES:
        raise ValueError(f"invalid shape of {short(name)}: {short(shape)}")
    return offsets[0], offsets[1], dtype, shape


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _array(
    raw: Content, dtype: str, shape: list[int], name: str, memory: MemoryLimit
) -> NDArray[Any]:
    if dtype == "BOOL" and raw.size and raw.max() > 1:
        raise ValueError(f"{short(name)} is BOOL and has the byte {raw.max()}, not 0 or 1")
    if dtype != BFLOAT16:
        return raw.view(DTYPES[dtype]).reshape(shape)
    memory.hold(2 * raw.nbytes, f"{short(name)} as float32 ({shown(raw.nbytes)} as bfloat16)")
    wide = raw.view("<u2").astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32).reshape(shape)
