"""The state of a replay on several ranks, which torch.distributed.checkpoint writes and reads.

Each rank writes what it holds, as safetensors with the places of its shards in JSON
(`HuggingFaceStorageWriter`): torch's own format keeps its metadata as a pickle, and nothing of a
file is executed here. What is no shard lies in one file of JSON beside them, with a checksum of
every file. Any number of ranks reads it, bitwise.
"""

import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from forkpoint.apps.replay.checkpoint import (
    changing,
    checkpoint_crc,
    numpy_random,
    parameters_of,
    plain_value,
)
from forkpoint.apps.replay.reading import CHANGED
from forkpoint.apps.replay.schema import MOST_FACTS_BYTES, SCHEMA, SHARDED_FACTS, SHARDS_FACTS
from forkpoint.apps.replay.states import Kept, check_states, generator_takes
from forkpoint.apps.replay.team import Team, gone
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.parallel.call import of_backend
from forkpoint.parallel.step import described
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.schema import SchemaError, parse_json

SIDE = "shared"
CHUNK_BYTES = 1 << 24
AGAIN = "Begin anew in another folder"


class ShardedCheckpoint:
    """State that a step changes, of a model that torch's fully_shard holds on several ranks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, team: Team) -> None:
        self.model = model
        self.optimizer = optimizer
        self.team = team
        self._loaded: tuple[dict[str, Any], dict[str, Tensor]] | None = None

    # Writing
    # ------------------------------------------------------------

    def write(self, path: Path) -> dict[str, Any]:
        """Write all ranks' state into a folder that is there; what belongs beside it. Collective.

        Raises UnsupportedError for state that a checkpoint cannot hold.
        """
        tensors, plain = self._state()
        own = {name: checkpoint_crc(tensors[name]) for name in self._buffers()}
        everybody = self.team.exchange(own)
        local = sorted(n for n in own if len({theirs[n] for theirs in everybody}) > 1)
        for name in local:
            tensors[_of_rank(self.team.index, name)] = tensors.pop(name)
        scalars = [name for name, tensor in tensors.items() if not tensor.dim()]
        try:
            save(
                {n: t.reshape(1) if n in scalars else t for n, t in tensors.items()},
                storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True),
                process_group=self.team.group,
            )
        except (RuntimeError, CheckpointException) as error:
            raise _explained(path, error, "written") from error
        files = self._files(path)
        generators = self.team.exchange(_generators())
        return {
            "ranks": self.team.size,
            "plain": plain,
            "scalars": scalars,
            "local": local,
            "files": files,
            "generators": generators,
        }

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain values of this rank; of parameters and their state its shards."""
        tensors = {f"{SIDE}/model/{n}": t.detach() for n, t in changing(self.model)}
        plain: dict[str, Any] = {}
        for index, parameter in enumerate(parameters_of(self.optimizer)):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                key = f"{SIDE}/optimizer/{index}/{name}"
                if isinstance(value, Tensor):
                    tensors[key] = value.detach()
                elif value is None or isinstance(value, bool | int | float | str):
                    plain[key] = plain_value(value)
                else:
                    raise UnsupportedError(
                        f"the optimizer {type(self.optimizer).__name__} keeps {name} as "
                        f"{type(value).__name__}; checkpoints hold tensors, numbers and text. "
                        "Replay without a folder, or with another optimizer."
                    )
        return tensors, plain

    def _buffers(self) -> list[str]:
        return [f"{SIDE}/model/{name}" for name, _ in self.model.named_buffers()]

    def _files(self, path: Path) -> dict[str, dict[str, int]]:
        """Sizes and checksums of the files of a folder; each rank reads a part. Collective."""
        names = sorted(entry.name for entry in path.glob("*.safetensors"))
        own = {
            name: {"bytes": (path / name).stat().st_size, "crc": _file_crc(path / name)}
            for name in names[self.team.index :: self.team.size]
        }
        everybody = self.team.exchange((names, own))
        if any(theirs != names for theirs, _ in everybody):
            raise ConfigError(
                f"{path.parent.parent} is not the same folder on all ranks: they see other files "
                "in it. Give --output a folder of a file system that all of them share."
            )
        return {name: facts for _, some in everybody for name, facts in some.items()}

    # Reading
    # ------------------------------------------------------------

    def load(self, path: Path) -> dict[str, Any]:
        """Read a folder, and return what was written beside the state; `put_back` does the rest.

        Collective. Raises ConfigError on all ranks unless all of it fits this model and optimizer
        and is whole.
        """
        self._loaded = None
        facts = self.team.each(lambda: self._whole(path))
        self.team.each(lambda: self._fits(path, facts))
        self.team.each(lambda: self._fill(path, facts))
        return facts

    def _whole(self, path: Path) -> dict[str, Any]:
        """Hold files against their checksums: each rank a part of them."""
        facts = read_sharded_facts(path)
        try:
            found = {entry.name for entry in path.glob("*.safetensors")}
            if found != facts["files"].keys():
                wrong = sorted(found ^ facts["files"].keys())
                missing = "lacks" if wrong[0] in facts["files"] else "has besides"
                raise ConfigError(
                    f"{path} {missing} {wrong[0]}, so the checkpoint is not whole. {AGAIN}."
                )
            for name in sorted(found)[self.team.index :: self.team.size]:
                known = facts["files"][name]
                size = (path / name).stat().st_size
                if size != known["bytes"]:
                    raise ConfigError(
                        f"{path / name} has {size} bytes, and was written with {known['bytes']}. "
                        f"{AGAIN}."
                    )
                if _file_crc(path / name) != known["crc"]:
                    raise ConfigError(f"{path / name} differs from its checksum. {AGAIN}.")
        except OSError as error:
            raise ConfigError(f"{path} is no whole checkpoint ({error}). {AGAIN}.") from error
        return facts

    def _fits(self, path: Path, facts: dict[str, Any]) -> None:
        """Hold headers and what is beside them against the model at hand."""
        try:
            if facts["local"] and facts["ranks"] != self.team.size:
                raise ConfigError(
                    f"{path} was written by {facts['ranks']} ranks, here are {self.team.size}, and "
                    f"each rank has values of its own for {short(facts['local'][0])}. Resume with "
                    f"{facts['ranks']} ranks."
                )
            self._tensors(path, facts)
            own = facts["generators"][self.team.index % facts["ranks"]]
            for name, state in own["torch"].items():
                if not generator_takes(name, _bytes_of(state)):
                    raise SchemaError(f"{name} has no state of a random number generator")
        except SchemaError as error:
            raise ConfigError(f"{path}: {error}. {CHANGED}.") from None
        except (OSError, SafetensorError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no whole checkpoint ({error!r}). {AGAIN}.") from error

    def _tensors(self, path: Path, facts: dict[str, Any]) -> dict[str, Tensor]:
        """Tensors to read a folder into, by their names in it; headers are held against them."""
        written = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
        expected: dict[str, Tensor] = {}
        buffers = set(self._buffers())
        for name, tensor in ((f"{SIDE}/model/{n}", t) for n, t in changing(self.model)):
            local = name in facts["local"] and name in buffers
            expected[_of_rank(self.team.index, name) if local else name] = tensor
        others = {_of_rank(r, name) for r in range(facts["ranks"]) for name in facts["local"]}
        states = {key for key in written if Kept.of(key) is not None}
        if (written.keys() - states) | others != expected.keys() | others:
            wrong = sorted((written.keys() - states - others) ^ (expected.keys() - others))
            raise ConfigError(
                f"{path} is a checkpoint of another model: {len(wrong)} tensors are in one of them "
                f"alone, among them {short(wrong[0]) if wrong else 'those of ranks'}. {AGAIN}."
            )
        parameters = parameters_of(self.optimizer)
        shapes = {
            key: () if key in facts["scalars"] else tuple(_tensor_of(written[key]).size)
            for key in states
        }
        check_states(SIDE, self.optimizer, parameters, shapes, facts["plain"])
        for key in states:
            kept = Kept.of(key)
            assert kept is not None
            if kept.side != SIDE:
                raise SchemaError(f"there is {short(key)}, which is no state of {SIDE}")
            parameter = parameters[kept.index]
            dtype = _tensor_of(written[key]).properties.dtype
            whole = shapes[key] == tuple(parameter.shape)
            expected[key] = (
                torch.zeros_like(parameter, dtype=dtype)
                if whole
                else torch.zeros(shapes[key], dtype=dtype)
            )
        found: dict[str, Tensor] = {}
        for key, tensor in expected.items():
            header = _tensor_of(written[key])
            shape = tuple(tensor.shape) or (1,)
            if tuple(header.size) != shape or header.properties.dtype != tensor.dtype:
                raise ConfigError(
                    f"{path} has {key} as {header.properties.dtype} of shape "
                    f"{tuple(header.size)}, and the model at hand as {tensor.dtype} of {shape}. "
                    f"{AGAIN}."
                )
            if sum(chunk.sizes.numel() for chunk in header.chunks) != header.size.numel():
                raise ConfigError(f"{path} lacks a part of {key}. {AGAIN}.")
            empty = torch.zeros_like(tensor.detach())
            found[key] = empty if empty.dim() else empty.reshape(1)
        return found

    def _fill(self, path: Path, facts: dict[str, Any]) -> None:
        """Read the tensors. Collective."""
        tensors = self._tensors(path, facts)
        try:
            load(
                tensors,
                storage_reader=HuggingFaceStorageReader(str(path)),
                process_group=self.team.group,
            )
        except (RuntimeError, CheckpointException) as error:
            raise _explained(path, error, "read") from error
        for name in facts["scalars"]:
            tensors[name] = tensors[name].reshape(())
        parameters = parameters_of(self.optimizer)
        for key, tensor in tensors.items():
            kept = Kept.of(key)
            if kept is not None:
                try:
                    kept.check(self.optimizer, parameters[kept.index], tensor, facts["step"])
                except SchemaError as error:
                    raise ConfigError(f"{path}: {error}. {CHANGED}.") from None
        self._loaded = facts, tensors

    def put_back(self) -> None:
        """Make what `load` has read the state of the model, the optimizer and the generators.

        A rank that the checkpoint has no generators of takes those of another.
        """
        assert self._loaded is not None
        (facts, tensors), self._loaded = self._loaded, None
        with torch.no_grad():
            for name, tensor in ((f"{SIDE}/model/{n}", t) for n, t in changing(self.model)):
                own = _of_rank(self.team.index, name)
                tensor.copy_(tensors[own if own in tensors else name])
        state: dict[int, dict[str, Any]] = {}
        for key, value in (*tensors.items(), *facts["plain"].items()):
            kept = Kept.of(key)
            if kept is not None:
                state.setdefault(kept.index, {})[kept.name] = value
        for index, parameter in enumerate(parameters_of(self.optimizer)):
            if index in state:
                self.optimizer.state[parameter] = state[index]
        own = facts["generators"][self.team.index % facts["ranks"]]
        for name, saved in own["torch"].items():
            if name == "cpu":
                torch.set_rng_state(_bytes_of(saved))
            elif torch.cuda.is_available():
                torch.cuda.set_rng_state(_bytes_of(saved))
        random.setstate(own["python_random"])
        kind, keys, *rest = own["numpy_random"]
        np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))  # noqa: NPY002


def read_sharded_facts(path: Path) -> dict[str, Any]:
    """Facts that were written beside the shards of a folder. Raises ConfigError for others."""
    file = path / SHARDS_FACTS
    if not file.is_file() or file.is_symlink() or file.stat().st_size > MOST_FACTS_BYTES:
        raise ConfigError(f"{path} is no whole checkpoint: it has no {SHARDS_FACTS}. {AGAIN}.")
    try:
        facts = parse_json(file.read_bytes())
        schema = facts.get("schema") if isinstance(facts, dict) else None
        if type(schema) is not int or schema != SCHEMA:
            raise ConfigError(
                f"{file} has schema {short(schema)}, and this forkpoint reads {SCHEMA}. Resume "
                "with the forkpoint that wrote it, or begin anew in another folder."
            )
        found = SHARDED_FACTS(facts, "")
        if len(found["generators"]) != found["ranks"]:
            raise SchemaError(f"generators are of {len(found['generators'])} ranks")
    except SchemaError as error:
        raise ConfigError(f"{file}: {error}. {CHANGED}.") from None
    return found


def _explained(path: Path, error: BaseException, done: str) -> BaseException:
    """The error to raise for one of torch.distributed.checkpoint."""
    if isinstance(error, CheckpointException):
        causes = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
        rank, cause = next(iter(causes.items()))
        if of_backend(cause):
            return gone(cause)
        return ConfigError(
            f"the checkpoint {path} cannot be {done} on rank {rank}: {described(cause)} Look at "
            "the room on its disk, and who may use it."
        )
    return gone(error)


def _tensor_of(metadata: Any) -> Any:
    if not isinstance(metadata, TensorStorageMetadata):
        raise SchemaError(f"there is {short(metadata)} in the place of a tensor")
    return metadata


def _of_rank(rank: int, name: str) -> str:
    return f"rank {rank}/{name}"


def _generators() -> dict[str, Any]:
    """The states of this rank's generators, ready for JSON."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {
        "torch": {name: state.numpy().tobytes().hex() for name, state in states.items()},
        "python_random": random.getstate(),
        "numpy_random": numpy_random(),
    }


def _bytes_of(text: str) -> Tensor:
    try:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
    except ValueError:
        raise SchemaError("the state of a generator is no hexadecimal text") from None


def _file_crc(path: Path) -> int:
    crc = 0
    for chunk in _chunks(path):
        crc = zlib.crc32(chunk, crc)
    return crc


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def facts_text(facts: dict[str, Any]) -> str:
    """The file beside the shards. Raises UnsupportedError where it would be too long to read."""
    text = json.dumps({"schema": SCHEMA, **facts}, allow_nan=False)
    if len(text) > MOST_FACTS_BYTES:
        raise UnsupportedError(
            f"{SHARDS_FACTS} would have {len(text)} bytes, and at most {MOST_FACTS_BYTES} can be "
            "read back. Replay on fewer ranks, or without a folder."
        )
    return text
