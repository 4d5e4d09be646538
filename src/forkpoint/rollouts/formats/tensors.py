"""Readers of torch files, by `torch.load(weights_only=True)`, and of safetensors, as numpy arrays.

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

ZIP_MAGIC = b"PK\x03\x04"
RECIPE = (
    "If you trust it, run the script of examples/export for verl, OpenRLHF or slime where that is "
    "installed, or torch.save its values as lists and tensors (docs/reference/rollouts.md)."
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
    """Read a value that torch.save wrote: dicts, lists, numbers, text, and numpy arrays for
    tensors.

    Arrays are views of the mapped file.

    Raises RolloutError, naming the file, if it is damaged, has values that
    `torch.load(weights_only=True)` does not build, or has objects that exceed the memory limit.
    """
    import torch

    try:
        memory.check(TIMES_FILE * _check_archive(path), "the objects of the file")
        with warnings.catch_warnings(action="ignore"):  # of protocols, and of nested tensors
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            return _plain(value, str(path), {}, 0)
    except (RolloutError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        names = re.search(r"GLOBAL (\S+)", str(error))
        reason = _first(str(error).rpartition("WeightsUnpickler error:")[2])
        raise RolloutError(
            f"{path} is not read by torch.load(weights_only=True): "
            f"{f'it names {names[1]}' if names else reason}. {RECIPE}"
        ) from None
    except Exception as error:  # of any kind where a file is damaged
        reason = f"{type(error).__name__}: {_first(str(error))}"
        raise RolloutError(f"{path} cannot be read as a torch file: {reason}. {_AGAIN}") from None


def read_safetensors(path: Path) -> dict[str, Any]:
    """Read the arrays of a safetensors file by name. They are views of the mapped file if numpy has
    their dtype.

    Raises RolloutError, naming the file, if it is damaged.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return _plain(found, str(path), {}, 0)
    except (RolloutError, MemoryError):
        raise
    except Exception as error:  # of any kind where a file is damaged
        raise RolloutError(
            f"{path} cannot be read as safetensors: {_first(str(error))}. {_AGAIN}"
        ) from None


def _check_archive(path: Path) -> int:
    """Check an archive, and return the size of its pickle in bytes.

    torch checks neither that entries are uncompressed nor their checksums.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if not pickles or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise RolloutError(
                f"{path} is a zip archive, but not as torch.save writes it: it holds "
                f"{short([entry.filename for entry in entries])}. Write it with torch.save."
            )
        if (damaged := archive.testzip()) is not None:
            raise RolloutError(f"{path} is damaged: the checksum of {damaged} is wrong. {_AGAIN}")
        return sum(entry.file_size for entry in pickles)


def _first(message: str) -> str:
    line = message.strip().partition("\n")[0].partition(". ")[0]
    return line[:_MOST_REASON].rstrip(".")


def _plain(value: Any, where: str, made: dict[int, Any], depth: int) -> Any:
    """Convert tensors in a value to numpy arrays, and nested tensors to lists of arrays.

    made: results by the id of the original, because a file may refer to one list many times.

    Raises RolloutError, naming the place, for tensors whose numbers cannot be read (sparse,
    quantized), and for lists and dicts that are nested more than 64 deep.
    """
    import torch

    if not isinstance(value, Mapping | list | tuple | torch.Tensor):
        return value
    if id(value) in made:
        return made[id(value)]
    if depth > _MOST_DEPTH:
        raise RolloutError(
            f"{where}: lists or dicts are nested more than {_MOST_DEPTH} deep. Write the file with "
            "fewer levels."
        )
    if isinstance(value, torch.Tensor):
        parts = value.unbind() if value.is_nested else None
        found = _array(value, where) if parts is None else [_array(part, where) for part in parts]
    elif isinstance(value, Mapping):
        found = {
            key: _plain(item, f"{where}, {key if isinstance(key, str) else short(key)}", made,
                        depth + 1)
            for key, item in value.items()
        }  # fmt: skip
    else:
        found = [_plain(item, where, made, depth + 1) for item in value]
    made[id(value)] = found
    return found


def _array(tensor: Any, where: str) -> Any:
    array = host_values(where, "the tensor", tensor)
    if array.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
        raise RolloutError(f"{where} has a boolean whose byte is neither 0 nor 1. {_AGAIN}")
    return array
