"""Classes of trainers that are not installed, under the names by which their pickles have them."""

import io
import pickle
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dumps import tensors, verl
from forkpoint import Rollout


class DataProto:
    """verl's class by its name, with the state that it pickles."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __getstate__(self) -> Any:
        return self.state


def verl_pickle(rollouts: Sequence[Rollout], way: str, temperature: float = 1.0) -> bytes:
    """A DataProto as save_to_disk pickles it, with its tensors in one of verl's ways."""
    table = verl(rollouts)
    uid = table.pop("uid")
    if way == "numpy":
        entries = {k: (str(v.dtype), v.shape, v.view(np.uint8).ravel()) for k, v in table.items()}
        batch: Any = ((len(rollouts),), None, entries)
    else:
        file = io.BytesIO()
        kinds = stand_ins()
        tensor_dict = kinds["TensorDict"](tensors(table), consolidated=way == "consolidated")
        torch.save(tensor_dict, file)
        batch = file.getvalue()
    settings = {"temperature": temperature, "reward_extra_keys": ["acc", "format"], "metrics": {}}
    proto = stand_ins()["DataProto"]((batch, {"uid": uid}, settings))
    return pickle.dumps(proto)


def add_module(name: str) -> Any:
    """An empty module of that name, and those above it, so that pickling finds what is put in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        full = ".".join(parts[:end])
        sys.modules.setdefault(full, types.ModuleType(full))
    return sys.modules[name]


def stand_ins() -> dict[str, Any]:
    """Modules by the names of verl's and tensordict's, whose objects pickle as theirs do."""
    if "verl.protocol" in sys.modules:
        return {
            "DataProto": sys.modules["verl.protocol"].DataProto,
            "TensorDict": sys.modules["tensordict._td"].TensorDict,
        }
    for name in ("verl.protocol", "tensordict._td", "tensordict._reductions"):
        add_module(name)
    DataProto.__module__ = "verl.protocol"
    sys.modules["verl.protocol"].DataProto = DataProto

    def consolidated(metadata: Any, storage: Any) -> None: ...

    def make(kind: Any, state: Any) -> None: ...

    class TensorDict:
        def __init__(self, entries: dict[str, torch.Tensor], consolidated: bool) -> None:
            self.entries, self.consolidated = entries, consolidated

        def __reduce__(self) -> Any:
            if not self.consolidated:
                size = torch.Size([len(next(iter(self.entries.values())))])
                return make, (TensorDict, {"_tensordict": self.entries, "_batch_size": size})
            leaves, pieces, begin = {}, [], 0
            for name, tensor in self.entries.items():
                raw = tensor.contiguous().view(-1).view(torch.uint8)
                pad = -len(raw) % 8
                end = begin + len(raw) + pad
                leaves[name] = (str(tensor.dtype), list(tensor.shape), "cpu", begin, end, pad)
                pieces += [raw, torch.zeros(pad, dtype=torch.uint8)]
                begin = end
            metadata = {
                "cls": "TensorDict",
                "non_tensors": {},
                "leaves": leaves,
                "cls_metadata": {},
            }
            return consolidated, (metadata, torch.cat(pieces))

    for function, name in (
        (consolidated, "_rebuild_tensordict_files_consolidated"),
        (make, "_make_td"),
    ):
        function.__module__ = "tensordict._reductions"
        function.__qualname__ = function.__name__ = name
        setattr(sys.modules["tensordict._reductions"], name, function)
    TensorDict.__module__, TensorDict.__qualname__ = "tensordict._td", "TensorDict"
    sys.modules["tensordict._td"].TensorDict = TensorDict
    return stand_ins()
