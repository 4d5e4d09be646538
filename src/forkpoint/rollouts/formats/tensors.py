"""Torch files, read by `torch.load(weights_only=True)`, and safetensors, as numpy arrays.

torch is imported when a file is read.
"""

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.fields import host_values
from forkpoint.rollouts.formats.limits import TIMES_FILE, MemoryLimit
from forkpoint.rollouts.formats.record import named

ZIP_MAGIC = b"PK\x03\x04"
RECIPE = (
    "Load it with the trainer that wrote it, if you trust it, and torch.save plain values: "
    "vars(experience) of OpenRLHF; of verl's DataProto {k: v.clone() for k, v in "
    "data.batch.items()} | {k: v.tolist() for k, v in data.non_tensor_batch.items()} | "
    "data.meta_info."
)
_AGAIN = "Copy or write the file again."
_MOST_DEPTH = 64
_MOST_REASON = 160


def refuse_pickle(path: Path) -> RolloutError:
    """The error for a pickle."""
    return RolloutError(
        f"{path} is a pickle, which can run code when it is loaded, and is not read. {RECIPE}"
    )


def read_torch(path: Path, memory: MemoryLimit) -> Any:
    """The value that torch.save wrote: dicts, lists, numbers, text, and numpy arrays for tensors.

    Arrays are views of the mapped file where it is an archive, as torch.save has written it since
    1.6. Older files are loaded as a whole.

    Raises RolloutError, naming the file, where it is damaged, holds what
    `torch.load(weights_only=True)` does not build, or has objects that take more memory than is
    left.
    """
    import torch

    with path.open("rb") as file:
        is_archive = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    try:
        parsed_bytes = _check_archive(path) if is_archive else path.stat().st_size
        memory.check(TIMES_FILE * parsed_bytes, "the objects of the file")
        with warnings.catch_warnings(action="ignore"):  # of protocols, and of nested tensors
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
            return plain(value, str(path))
    except (RolloutError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        named_code = re.search(r"GLOBAL (\S+)", str(error))
        reason = (
            f"it names {named_code[1]}"
            if named_code
            else _first(str(error).rpartition("WeightsUnpickler error:")[2])
        )
        raise RolloutError(
            f"{path} is not read by torch.load(weights_only=True): {reason}. {RECIPE}"
        ) from None
    except Exception as error:  # of any kind where a file is damaged
        reason = f"{type(error).__name__}: {_first(str(error))}"
        raise RolloutError(f"{path} cannot be read as a torch file: {reason}. {_AGAIN}") from None


def read_safetensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file by name, as views of the mapped file where numpy has their
    dtype.

    Raises RolloutError, naming the file, where it is damaged.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return plain(found, str(path))
    except (RolloutError, MemoryError):
        raise
    except Exception as error:  # of any kind where a file is damaged
        raise RolloutError(
            f"{path} cannot be read as safetensors: {_first(str(error))}. {_AGAIN}"
        ) from None


def _check_archive(path: Path) -> int:
    """Bytes of the pickle in an archive whose entries are stored as they are and have the right
    checksums, neither of which torch checks."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise RolloutError(
                f"{path} is an archive of compressed entries, and torch.save compresses none. "
                "Write it with torch.save, and compress the whole file where it is kept."
            )
        names = [entry.filename for entry in entries]
        if not any(name.endswith("/data.pkl") for name in names):
            raise RolloutError(
                f"{path} is a zip archive of something else than a torch file: it holds "
                f"{short(names)}. Arrays are read from safetensors and from what torch.save writes."
            )
        damaged = archive.testzip()
        if damaged is not None:
            raise RolloutError(f"{path} is damaged: the checksum of {damaged} is wrong. {_AGAIN}")
        return sum(entry.file_size for entry in entries if entry.filename.endswith("/data.pkl"))


def _first(message: str) -> str:
    """The first sentence of a message of torch."""
    line = message.strip().partition("\n")[0].partition(". ")[0]
    return line[:_MOST_REASON].rstrip(".")


def plain(value: Any, where: str) -> Any:
    """A value with numpy arrays for its tensors, and lists of arrays for nested ones.

    Raises RolloutError, naming the place, for tensors whose numbers cannot be read (sparse,
    quantized), and for lists and dicts that are nested more than 64 deep.
    """
    return _Plain().made(value, where, 0)


class _Plain:
    """Values by the ids of what they were made of: a file may name one list many times."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def made(self, value: Any, where: str, depth: int) -> Any:
        import torch

        if not isinstance(value, Mapping | list | tuple | torch.Tensor):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._new(value, where, depth)
        return self._made[id(value)]

    def _new(self, value: Any, where: str, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise RolloutError(
                f"{where}: lists or dicts are nested more than {_MOST_DEPTH} deep. Write each "
                "rollout as one flat dict."
            )
        if isinstance(value, Mapping):
            return {
                key: self.made(item, f"{where}, {named(key)}", depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.made(item, where, depth + 1) for item in value]
        return _array(value, where)


def _array(tensor: Any, where: str) -> Any:
    """A tensor as an array; a nested one as a list of them."""
    if tensor.is_nested:
        return [_array(row, where) for row in tensor.unbind()]
    array = host_values(where, "the tensor", tensor)
    if array.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
        raise RolloutError(f"{where} has a boolean whose byte is neither 0 nor 1. {_AGAIN}")
    return array
