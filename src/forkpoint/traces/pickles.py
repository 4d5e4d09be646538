"""Pickles and torch files, read without running what they name.

A pickle is a program: loading it may call anything. Here only what builds arrays, tensors and plain
containers is called, and the classes of the dumps that are read become empty shells that keep their
fields; anything else that a pickle names is refused by its name.
"""

import _codecs
import io
import math
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from forkpoint.errors import RolloutError
from forkpoint.rollouts import short
from forkpoint.traces.archives import check_archive

DATA_PROTO = 'torch.save({"batch": dict(data.batch.items()), "non_tensor_batch": ' + (
    'data.non_tensor_batch, "meta_info": data.meta_info}, path)'
)


MOST_REPEATED = 1 << 28
"""The most entries of a tensor that repeats the numbers that it holds, as expanded ones do."""


class Shell:
    """Stands for an object of a class that is not imported: its state, and nothing else."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class DataProto(Shell):
    """verl's batch: (tensors, arrays that are no tensors, settings)."""


class Fields(Shell):
    """A dataclass of a trainer: its fields by name."""


class TensorDict(Shell):
    """A TensorDict; its tensors are in `_tensordict`."""


class Array(np.ndarray):
    """An array of a pickle, which is made only where what it declares to hold is there.

    numpy's own makes room for as much as a pickle says, and fills it.
    """

    def __new__(cls, *_: Any, **__: Any) -> "Array":
        raise ValueError("an array is made in another way than numpy's")

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, _, data = state
        declared = math.prod(shape)
        found = len(data) if isinstance(data, list) else len(data) // max(1, dtype.itemsize)
        if declared != found or isinstance(data, list) != dtype.hasobject:
            raise ValueError(
                f"an array declares {declared} entries of {dtype}, and there are {found}"
            )
        super().__setstate__(state)


def _reconstruct(_kind: Any, shape: Any, _code: Any) -> Array:
    """An empty array, which is what numpy writes: what it holds comes with its state."""
    if shape != (0,):
        raise ValueError(f"an array begins with the shape {short(shape)}, and numpy writes (0,)")
    return np.ndarray.__new__(Array, (0,), np.int8)


def _tensordict(_kind: Any, state: Any) -> TensorDict:
    made = TensorDict()
    made.__setstate__(state)
    return made


def _consolidated(metadata: Any, storage: Any) -> TensorDict:
    """A TensorDict whose tensors lie in one storage of bytes."""
    tensors: dict[str, Any] = {}
    for name, (kind, shape, *rest) in metadata["leaves"].items():
        import torch

        # Older versions wrote neither the device before the two ends nor the padding after them.
        start, stop = rest[1:3] if not isinstance(rest[0], int) else rest[:2]
        dtype = getattr(torch, str(kind).removeprefix("torch."))
        count = int(np.prod(shape, dtype=np.int64))
        tensors[name] = storage[start:stop].view(dtype)[:count].view(*shape)
    return _tensordict(None, {"_tensordict": tensors})


SHELLS: dict[str, Any] = {
    "verl.protocol.DataProto": DataProto,
    "openrlhf.trainer.ppo_utils.experience.Experience": Fields,
    "openrlhf.trainer.ppo_utils.experience_maker.Experience": Fields,
    "openrlhf.trainer.ppo_utils.replay_buffer.BufferItem": Fields,
    "trl.experimental.async_grpo.async_rollout_worker.RolloutSample": Fields,
    "tensordict._td.TensorDict": TensorDict,
    "tensordict._reductions._make_td": _tensordict,
    "tensordict._reductions._rebuild_tensordict_files_consolidated": _consolidated,
}


def load_torch(source: Path | BinaryIO, where: str) -> Any:
    """What torch.save wrote, with arrays for tensors. Raises RolloutError, naming `where`."""
    import torch

    size = check_archive(source, where)
    allowed: list[Any] = [(made, name) for name, made in {**SHELLS, **_numpy()}.items()]
    allowed += {type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdOSU"}
    try:
        with torch.serialization.safe_globals(allowed):
            loaded = torch.load(source, map_location="cpu", weights_only=True)
        return plain(loaded, where, size)
    except RolloutError:
        raise
    except Exception as error:  # a damaged file makes torch raise errors of many kinds
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and named:
            raise _refused(where, f"it names {named[1]}") from None
        raise _unreadable(where, "torch file", error) from None


def load_pickle(path: Path) -> Any:
    """What pickle.dump wrote, with arrays for tensors. Raises RolloutError, naming the file."""
    with path.open("rb") as file:
        try:
            return plain(_Unpickler(file, str(path)).load(), str(path), path.stat().st_size)
        except RolloutError:
            raise
        except Exception as error:  # a damaged pickle makes its reader raise errors of many kinds
            raise _unreadable(str(path), "pickle", error) from None


def plain(value: Any, where: str, size: int) -> Any:
    """`value` with numpy arrays for tensors, and shells opened.

    Args:
        value: what was loaded.
        where: names it in messages.
        size: bytes of the file, more than which a tensor cannot hold.
    """
    if isinstance(value, DataProto):
        return _data_proto(value, where, size)
    if isinstance(value, TensorDict):
        return plain(value.state["_tensordict"], where, size)
    if isinstance(value, Fields):
        states = value.state if isinstance(value.state, tuple) else (value.state,)  # with slots
        named = [item for state in states if state for item in state.items()]
        return {name: plain(entry, f"{where}, {name}", size) for name, entry in named}
    if isinstance(value, Mapping):
        return {key: plain(entry, f"{where}, {key}", size) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, where, size) for entry in value]
    if isinstance(value, Array):
        return value.view(np.ndarray)
    torch = sys.modules.get("torch")  # there is no tensor where it has not been imported
    if torch is not None and isinstance(value, torch.Tensor):
        return _array(value, where, size)
    return value


def _array(tensor: Any, where: str, size: int) -> Any:
    import torch

    if tensor.is_nested:
        return [_array(row, where, size) for row in tensor.unbind()]
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise RolloutError(f"{where}: a tensor is {tensor.layout}; dense ones can be read.")
    held = tensor.untyped_storage().nbytes()
    if held > size:
        raise RolloutError(
            f"{where}: a tensor declares {held} bytes, and the file has {size}. Copy or write the "
            "file again."
        )
    if tensor.numel() > max(held // tensor.element_size(), MOST_REPEATED):
        raise RolloutError(
            f"{where}: a tensor declares {tensor.numel()} entries, and holds "
            f"{held // tensor.element_size()} numbers that it repeats; at most {MOST_REPEATED} are "
            "read. Write it with .contiguous()."
        )
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype.is_floating_point else tensor).numpy()


def _data_proto(data: DataProto, where: str, size: int) -> dict[str, Any]:
    tensors, others, settings = data.state
    if isinstance(tensors, bytes):
        tensors = load_torch(io.BytesIO(tensors), where)
    elif isinstance(tensors, tuple):  # VERL_DATAPROTO_SERIALIZATION_METHOD=numpy
        tensors = {name: _bytes(*entry) for name, entry in tensors[2].items()}
    return {
        "batch": plain(tensors, where, size),
        "non_tensor_batch": plain(others, where, size),
        "meta_info": plain(settings, where, size),
    }


def _bytes(dtype: str, shape: Any, *data: Any) -> Any:
    """A tensor written as its dtype's name, its shape and its bytes; or a list of such, nested."""
    if not data:  # (layout, [(dtype, shape, bytes), ...])
        return [_bytes(*entry) for entry in shape]
    raw = np.asarray(data[0], np.uint8).tobytes()
    if dtype == "bfloat16":
        wide = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    return np.frombuffer(raw, np.dtype(dtype)).reshape(shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, where: str) -> None:
        super().__init__(file)
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in SHELLS:
            return SHELLS[full]
        known = {**_numpy(), "collections.OrderedDict": OrderedDict, "torch.Size": tuple}
        if full in known:
            return known[full]
        if full == "torch._utils._rebuild_tensor_v2":
            from torch._utils import _rebuild_tensor_v2

            return _rebuild_tensor_v2
        if full == "torch.storage._load_from_bytes":  # torch's own loads any pickle
            return self._storage
        raise _refused(self.where, f"it names {full}")

    def _storage(self, content: bytes) -> Any:
        import torch

        check_archive(io.BytesIO(content), self.where)
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _numpy() -> dict[str, Any]:
    """What a pickle of numpy arrays names, by both names that numpy has had for it."""
    own = "numpy._core" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core"
    multiarray: Any = import_module(f"{own}.multiarray")
    numeric: Any = import_module(f"{own}.numeric")
    found: dict[str, Any] = {
        "numpy.ndarray": Array,
        "numpy.dtype": np.dtype,
        "_codecs.encode": _codecs.encode,
    }
    for package in ("numpy.core", "numpy._core"):
        found[f"{package}.multiarray._reconstruct"] = _reconstruct
        found[f"{package}.multiarray.scalar"] = multiarray.scalar
        found[f"{package}.numeric._frombuffer"] = numeric._frombuffer
    return found


def _refused(where: str, what: str) -> RolloutError:
    return RolloutError(
        f"{where} is a pickle that could run code: {what}. Only arrays, tensors and plain "
        f"containers are loaded. Write these alone; a verl batch with {DATA_PROTO}."
    )


def _unreadable(where: str, what: str, error: Exception) -> RolloutError:
    return RolloutError(
        f"{where} cannot be read as a {what}: {type(error).__name__}: {short(str(error))}. Copy or "
        "write the file again."
    )
