"""The state of both sides of a replay as tensors of one safetensors file.

Loading is bitwise: optimizer state is put back as it was, not through `load_state_dict`, which
casts it to the parameters' dtype, and values are copied out of the file, so that all of them lie in
memory as torch allocates it.
"""

import hashlib
import json
import random
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from forkpoint.errors import ConfigError, UnsupportedError

SCHEMA = 1
Side = tuple[nn.Module, torch.optim.Optimizer]


class Checkpoint:
    """What a step changes: parameters, buffers, optimizer state and random number generators."""

    def __init__(self, sides: Mapping[str, Side]) -> None:
        self.sides = sides
        self.cuda: bool = torch.cuda.is_available()

    def write(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write everything to `path`, which is synced to disk, with `facts` beside it.

        Raises UnsupportedError for optimizer state that neither tensors nor JSON can hold.
        """
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        for side, (model, optimizer) in self.sides.items():
            for name, tensor in _changing(model):
                tensors[f"{side}/model/{name}"] = tensor.detach()
            for index, parameter in enumerate(_parameters(optimizer)):
                for name, value in optimizer.state.get(parameter, {}).items():
                    key = f"{side}/optimizer/{index}/{name}"
                    if isinstance(value, Tensor):
                        tensors[key] = value.detach()
                    elif value is None or isinstance(value, bool | int | float | str):
                        plain[key] = value
                    else:
                        raise UnsupportedError(
                            f"the optimizer {type(optimizer).__name__} keeps {name} as "
                            f"{type(value).__name__}; checkpoints hold tensors, numbers and text. "
                            "Replay without a folder, or with another optimizer."
                        )
        devices = {name: tensor.device.type for name, tensor in tensors.items()}
        tensors |= self._generators()
        tensors = {name: _copy(tensor) for name, tensor in tensors.items()}
        facts = {
            "schema": SCHEMA,
            **facts,
            "devices": devices,
            "plain": plain,
            "python_random": random.getstate(),
            "numpy_random": [_plain(part) for part in np.random.get_state()],  # noqa: NPY002
            "crc32": {name: _crc(tensor) for name, tensor in tensors.items()},
        }
        save_file(tensors, path, metadata={"forkpoint": json.dumps(facts)})

    def read(self, path: Path) -> dict[str, Any]:
        """Put the state of a file back, and return the facts written beside it.

        Nothing is put back unless all of it fits and is whole. Raises ConfigError otherwise.
        """
        facts, tensors = _load(path)
        expected: dict[str, Tensor] = {}
        for side, (model, _) in self.sides.items():
            for name, tensor in _changing(model):
                expected[f"{side}/model/{name}"] = tensor
        found = {name for name in tensors if "/model/" in name}
        if found != expected.keys():
            wrong = sorted(found ^ expected.keys())
            raise ConfigError(
                f"{path} is a checkpoint of another model: {len(wrong)} tensors are in one of them "
                f"alone, among them {wrong[0]}."
            )
        with torch.no_grad():
            for name, tensor in expected.items():
                tensor.copy_(tensors[name])
        for side, (_, optimizer) in self.sides.items():
            state: dict[int, dict[str, Any]] = {}
            for key, value in (*tensors.items(), *facts["plain"].items()):
                owner, kind, *rest = key.split("/", 3)
                if (owner, kind) == (side, "optimizer"):
                    if isinstance(value, Tensor):
                        value = value.to(facts["devices"][key])
                    state.setdefault(int(rest[0]), {})[rest[1]] = value
            for index, parameter in enumerate(_parameters(optimizer)):
                if index in state:
                    optimizer.state[parameter] = state[index]
        torch.set_rng_state(tensors["random/cpu"])
        if self.cuda:
            torch.cuda.set_rng_state_all(
                [tensors[f"random/cuda:{n}"] for n in range(torch.cuda.device_count())]
            )
        version, numbers, gauss = facts["python_random"]
        random.setstate((version, tuple(numbers), gauss))
        kind, keys, *rest = facts["numpy_random"]
        np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))  # noqa: NPY002
        return facts

    def _generators(self) -> dict[str, Tensor]:
        states = {"random/cpu": torch.get_rng_state()}
        if self.cuda:
            for index, state in enumerate(torch.cuda.get_rng_state_all()):
                states[f"random/cuda:{index}"] = state
        return states


def model_digest(model: nn.Module) -> str:
    """A digest of every parameter and buffer: names, dtypes, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _changing(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What training may change. Frozen parameters are the model's own, whose digest is held."""
    yield from ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    yield from model.named_buffers()


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _load(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and tensors of a file, each in memory of its own, checked against their checksums."""
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {}).get("forkpoint", "{}"))
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{path} is no whole checkpoint ({error}). Begin anew in another folder."
        ) from error
    if facts.get("schema") != SCHEMA:
        raise ConfigError(
            f"{path} has schema {facts.get('schema')!r}, and this forkpoint reads {SCHEMA}. Resume "
            "with the forkpoint that wrote it, or begin anew in another folder."
        )
    damaged = sorted(n for n in {*tensors, *facts["crc32"]} if not _whole(tensors, facts, n))
    if damaged:
        raise ConfigError(
            f"{path} is damaged: {len(damaged)} of its tensors differ from their checksums, among "
            f"them {damaged[0]}. Begin anew in another folder."
        )
    return facts, tensors


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU, in memory of its own: safetensors refuses tensors that are parts of one."""
    here = tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
    return here.contiguous()


def _whole(tensors: dict[str, Tensor], facts: dict[str, Any], name: str) -> bool:
    return name in tensors and facts["crc32"].get(name) == _crc(tensors[name])


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(_bytes(tensor))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
