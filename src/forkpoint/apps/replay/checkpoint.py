"""The state of both sides of a replay as tensors of one safetensors file.

Loading is bitwise: optimizer state is put back as it was, not through `load_state_dict`, which
casts it to the parameters' dtype, and values are copied out of the file, so that all of them lie in
memory as torch allocates it.

Nothing of a file is believed: what belongs in it follows from the models and the optimizers at
hand, and names, dtypes and shapes are compared with that before a tensor is read.
"""

import hashlib
import json
import math
import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from forkpoint.apps.replay.reading import CHANGED
from forkpoint.apps.replay.schema import FACTS, SCHEMA
from forkpoint.apps.replay.states import Kept, check_states, generator_takes
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.schema import SchemaError, parse_json

Side = tuple[nn.Module, torch.optim.Optimizer]
FACTS_KEY = "forkpoint"


@dataclass
class _Loaded:
    """A checkpoint that was read and found to fit, and is not put back yet."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


class Checkpoint:
    """State that a step changes: parameters, buffers, optimizer state, random generators."""

    def __init__(self, sides: Mapping[str, Side]) -> None:
        self.sides = sides
        self.cuda: bool = torch.cuda.is_available()
        self._loaded: _Loaded | None = None

    def write(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write everything to `path`, with `facts` beside it.

        Raises UnsupportedError for state that a checkpoint cannot hold, and OSError where the file
        cannot be written.
        """
        tensors = {name: tensor.detach() for name, tensor in self._of_models()}
        plain: dict[str, Any] = {}
        for side, (_, optimizer) in self.sides.items():
            for index, parameter in enumerate(parameters_of(optimizer)):
                for name, value in optimizer.state.get(parameter, {}).items():
                    key = f"{side}/optimizer/{index}/{name}"
                    if isinstance(value, Tensor):
                        tensors[key] = value.detach()
                    elif value is None or isinstance(value, bool | int | float | str):
                        plain[key] = plain_value(value)
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
            "numpy_random": numpy_random(),
            "crc32": {name: checkpoint_crc(tensor) for name, tensor in tensors.items()},
        }
        text = json.dumps(facts, allow_nan=False)
        try:
            save_file(tensors, path, metadata={FACTS_KEY: text})
        except SafetensorError as error:
            raise OSError(
                f"the checkpoint {path} cannot be written: {error}. Look at the room on its disk."
            ) from error

    def load(self, path: Path) -> dict[str, Any]:
        """Read a file and return the facts written beside the state; `put_back` does the rest.

        Raises ConfigError unless all of it fits these models and optimizers and is whole.
        """
        self._loaded = None
        try:
            with safe_open(path, "pt") as file:
                facts = _facts(path, (file.metadata() or {}).get(FACTS_KEY))
                self._check_header(path, facts, file)
                # Each in memory of its own.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            damaged = sorted(
                n for n, t in tensors.items() if facts["crc32"][n] != checkpoint_crc(t)
            )
            if damaged:
                raise ConfigError(
                    f"{path} is damaged: {len(damaged)} of its tensors differ from their "
                    f"checksums, among them {short(damaged[0])}. Begin anew in another folder."
                )
            self._check_values(facts, tensors)
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path} is no whole checkpoint ({error}). Begin anew in another folder."
            ) from error
        except SchemaError as error:
            raise ConfigError(f"{path}: {error}. {CHANGED}.") from None
        self._loaded = _Loaded(facts, tensors)
        return facts

    def put_back(self) -> None:
        """Make what `load` has read the state of models, optimizers and generators."""
        assert self._loaded is not None
        facts, tensors = self._loaded.facts, self._loaded.tensors
        self._loaded = None
        with torch.no_grad():
            for name, tensor in self._of_models():
                tensor.copy_(tensors[name])
        for side, (_, optimizer) in self.sides.items():
            state: dict[int, dict[str, Any]] = {}
            for key, value in (*tensors.items(), *facts["plain"].items()):
                kept = Kept.of(key)
                if kept is not None and kept.side == side:
                    if isinstance(value, Tensor):
                        value = value.to(facts["devices"][key])
                    state.setdefault(kept.index, {})[kept.name] = value
            for index, parameter in enumerate(parameters_of(optimizer)):
                if index in state:
                    optimizer.state[parameter] = state[index]
        torch.set_rng_state(tensors["random/cpu"])
        if self.cuda:
            torch.cuda.set_rng_state_all(
                [tensors[f"random/cuda:{n}"] for n in range(torch.cuda.device_count())]
            )
        random.setstate(facts["python_random"])
        kind, keys, *rest = facts["numpy_random"]
        np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))  # noqa: NPY002

    def _generators(self) -> dict[str, Tensor]:
        states = {"random/cpu": torch.get_rng_state()}
        if self.cuda:
            for index, state in enumerate(torch.cuda.get_rng_state_all()):
                states[f"random/cuda:{index}"] = state
        return states

    def _check_header(self, path: Path, facts: dict[str, Any], file: Any) -> None:
        """Refuse a file before any tensor is read, by what its header says of them."""
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        generators = self._generators()
        expected = {**dict(self._of_models()), **generators}
        states = {name: shape for name, shape in shapes.items() if Kept.of(name) is not None}
        found = shapes.keys() - states.keys()
        if found != expected.keys():
            wrong = sorted(found ^ expected.keys())
            raise ConfigError(
                f"{path} is a checkpoint of another model: {len(wrong)} tensors are in one of them "
                f"alone, among them {short(wrong[0])}. Begin anew in another folder."
            )
        for name, tensor in expected.items():
            if shapes[name] != tuple(tensor.shape):
                raise ConfigError(
                    f"{path} has {name} with shape {shapes[name]}, and the model at hand has "
                    f"{tuple(tensor.shape)}. Begin anew in another folder."
                )
        for field, known in (("crc32", {*shapes}), ("devices", shapes.keys() - generators.keys())):
            if facts[field].keys() != known:
                wrong = sorted(facts[field].keys() ^ known)
                raise SchemaError(
                    f"{field} and the tensors of the file have other names, among them "
                    f"{short(wrong[0])}"
                )
        for key in (*states, *facts["plain"]):
            kept = Kept.of(key)
            if kept is None or kept.side not in self.sides:
                raise SchemaError(
                    f"there is {short(key)}, which is no state of {' or '.join(self.sides)}"
                )
        for side, (_, optimizer) in self.sides.items():
            check_states(side, optimizer, parameters_of(optimizer), states, facts["plain"])

    def _check_values(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Refuse values that a model, an optimizer or a generator fails on. Raises SchemaError."""
        for name in self._generators():
            if not generator_takes(name.removeprefix("random/"), tensors[name]):
                raise SchemaError(f"{name} is no state of a random number generator")
        for name, tensor in self._of_models():
            if tensors[name].dtype != tensor.dtype:
                raise SchemaError(f"{name} is {tensors[name].dtype}, and here {tensor.dtype}")
        for side, (model, optimizer) in self.sides.items():
            kinds = {"cpu", *(p.device.type for p in model.parameters())}
            parameters = parameters_of(optimizer)
            for key, device in facts["devices"].items():
                if key.startswith(f"{side}/") and device not in kinds:
                    allowed = " or ".join(sorted(kinds))
                    raise SchemaError(f"devices.{key} is {short(device)}; it takes {allowed}")
            for key, tensor in tensors.items():
                kept = Kept.of(key)
                if kept is not None and kept.side == side:
                    kept.check(optimizer, parameters[kept.index], tensor, facts["step"])

    def _of_models(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the models that training changes, by names in the file."""
        for side, (model, _) in self.sides.items():
            for name, tensor in changing(model):
                yield f"{side}/model/{name}", tensor


def model_digest(model: nn.Module) -> str:
    """A digest of every parameter and buffer: names, dtypes, shapes and bytes.

    Collective where parameters are sharded, and the same as that of the model before.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def changing(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that training may change. Of frozen parameters the model's digest is held."""
    yield from ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    yield from model.named_buffers()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of an optimizer, over all of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _facts(path: Path, text: str | None) -> dict[str, Any]:
    """Metadata that was written beside the state."""
    try:
        facts = {} if text is None else parse_json(text)
        schema = facts.get("schema") if isinstance(facts, dict) else None
        if type(schema) is not int or schema != SCHEMA:
            raise ConfigError(
                f"{path} has schema {short(schema)}, and this forkpoint reads {SCHEMA}. Resume "
                "with the forkpoint that wrote it, or begin anew in another folder."
            )
        return FACTS(facts, "")
    except SchemaError as error:
        raise ConfigError(f"{path}, its metadata: {error}. {CHANGED}.") from None


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU, in memory of its own: safetensors refuses tensors that are parts of one."""
    here = tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
    return here.contiguous()


def _bytes(tensor: Tensor) -> memoryview:
    whole = getattr(tensor, "full_tensor", None)  # of shards, which is collective
    tensor = tensor if whole is None else whole()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def checkpoint_crc(tensor: Tensor) -> int:
    """The checksum of a tensor's bytes."""
    return zlib.crc32(_bytes(tensor))


def plain_value(value: Any) -> Any:
    """A value as JSON has it; a number that JSON lacks as a list of its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return ["NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"]
    return value


def numpy_random() -> list[Any]:
    """The state of numpy's global generator, ready for JSON."""
    state: Any = np.random.get_state()  # noqa: NPY002
    if isinstance(state, dict):
        raise UnsupportedError(
            f"numpy's global generator is {state.get('bit_generator')}; checkpoints hold the state "
            "of MT19937. Replay without a folder, or leave numpy its own generator."
        )
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in state]
