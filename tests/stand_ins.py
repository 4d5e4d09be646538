"""Classes of trainers that are not installed, under the names by which their pickles have them."""

import io
import pickle
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dumps import tensors, verl
from forkpoint import Rollout


class DataProto:
    """verl's class by its name, with the state that it pickles."""

    __module__ = "verl.protocol"

    def __init__(self, state: Any) -> None:
        self.state = state

    def __getstate__(self) -> Any:
        return self.state


class TensorDict:
    """tensordict's class by its name, which pickles in either of its two ways."""

    __module__ = "tensordict._td"

    def __init__(self, entries: dict[str, torch.Tensor], consolidated: bool) -> None:
        self.entries, self.consolidated = entries, consolidated

    def __reduce__(self) -> Any:
        if not self.consolidated:
            size = torch.Size([len(next(iter(self.entries.values())))])
            return _make_td, (TensorDict, {"_tensordict": self.entries, "_batch_size": size})
        leaves, pieces, begin = {}, [], 0
        for name, tensor in self.entries.items():
            raw = tensor.contiguous().view(-1).view(torch.uint8)
            pad = -len(raw) % 8
            end = begin + len(raw) + pad
            leaves[name] = (str(tensor.dtype), list(tensor.shape), "cpu", begin, end, pad)
            pieces += [raw, torch.zeros(pad, dtype=torch.uint8)]
            begin = end
        metadata = {"cls": "TensorDict", "non_tensors": {}, "leaves": leaves, "cls_metadata": {}}
        return _rebuild_tensordict_files_consolidated, (metadata, torch.cat(pieces))


def _make_td(kind: Any, state: Any) -> None: ...


def _rebuild_tensordict_files_consolidated(metadata: Any, storage: Any) -> None: ...


for _function in (_make_td, _rebuild_tensordict_files_consolidated):
    _function.__module__ = "tensordict._reductions"

VERL = (DataProto, TensorDict, _make_td, _rebuild_tensordict_files_consolidated)


@contextmanager
def importable(*objects: Any) -> Iterator[None]:
    """Modules that have these objects by the names that they bear, which pickling looks for.

    They take the place of what is installed, and leave it again: other tests ask whether it is.
    """
    modules: dict[str, Any] = {}
    for one in objects:
        parts = one.__module__.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            modules.setdefault(name, types.ModuleType(name))
        setattr(modules[one.__module__], one.__qualname__, one)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def verl_pickle(rollouts: Sequence[Rollout], way: str, temperature: float = 1.0) -> bytes:
    """A DataProto as save_to_disk pickles it, with its tensors in one of verl's ways."""
    table = verl(rollouts)
    uid = table.pop("uid")
    if way == "numpy":
        entries = {k: (str(v.dtype), v.shape, v.view(np.uint8).ravel()) for k, v in table.items()}
        batch: Any = ((len(rollouts),), None, entries)
    else:
        file = io.BytesIO()
        with importable(*VERL):
            torch.save(TensorDict(tensors(table), consolidated=way == "consolidated"), file)
        batch = file.getvalue()
    settings = {"temperature": temperature, "reward_extra_keys": ["acc", "format"], "metrics": {}}
    return data_proto(batch, {"uid": uid}, settings)


def data_proto(*state: Any) -> bytes:
    """The pickle of a DataProto of that state."""
    with importable(*VERL):
        return pickle.dumps(DataProto(state))
