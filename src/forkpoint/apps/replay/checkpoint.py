"""Checkpoints of a replay, written and read by torch.distributed.checkpoint.

A checkpoint is a folder, `checkpoint-00000012` after 12 steps. Each rank writes the tensors that it
holds as safetensors (`HuggingFaceStorageWriter`): torch's own format keeps its metadata as a
pickle. `state.json` beside them holds everything else, and a SHA-256 of every file. Any number of
ranks can read it. Tensors come back bit by bit: optimizer state is put into the optimizer as it
was, because `load_state_dict` would cast it to the parameters' dtype.
"""

import hashlib
import math
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
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
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from forkpoint.apps.replay.folder import ReplayFolder
from forkpoint.apps.replay.ranks import RankGroup, full_tensor, lost_rank
from forkpoint.apps.replay.records import ReplayStep
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.parallel.call import of_backend
from forkpoint.parallel.step import described
from forkpoint.rollouts.batch import short

Side = tuple[nn.Module, torch.optim.Optimizer]
_STATE = re.compile(r"(\w+)/optimizer/(0|[1-9]\d{0,8})/(.+)", re.ASCII | re.DOTALL)
_AGAIN = "Begin anew in another folder."
_FILE_BYTES = 1 << 31


class Checkpoints:
    """The state that a step changes, saved in a replay's folder. Methods are collective.

    Args:
        folder: of the replay.
        sides: the models with their optimizers, by name.
        ranks: those that hold the models.
    """

    def __init__(self, folder: ReplayFolder, sides: Mapping[str, Side], ranks: RankGroup) -> None:
        self.folder = folder
        self.sides = sides
        self.ranks = ranks

    def save(self, step: int) -> None:
        """Make the state after `step` steps the checkpoint.

        Raises:
            UnsupportedError: an optimizer keeps state that is neither tensors nor plain values, or
                the buffers of a model differ between ranks.
            ConfigError: the files cannot be written.
        """
        path = self.ranks.first(lambda: self.folder.begin_checkpoint(step))
        facts = self.ranks.each(lambda: self._write(path))
        self.ranks.first(lambda: self.folder.finish_checkpoint(step, facts))

    def restore(self) -> list[ReplayStep]:
        """Put the last checkpoint back, and return the steps up to it; none without a checkpoint.

        Raises ConfigError, before anything changes, unless it is whole and fits the models.
        """
        found = self.ranks.first(self.folder.last_checkpoint)
        facts, steps = (None, []) if found is None else found[1:]
        if found is not None:
            path, facts, _ = found
            self.ranks.each(lambda: self._check_files(path, facts["files"]))
            tensors = self.ranks.each(lambda: self._expected(path, facts))
            given = facts["generators"]
            # A rank that the checkpoint has none of takes those of another.
            self.ranks.each(lambda: _set_generators(path, given[self.ranks.index % len(given)]))
            self._transfer(path, "read", tensors)
            self._put_back(tensors, facts)
        self.ranks.first(lambda: self.folder.cut(facts, steps))
        return steps

    def _write(self, path: Path) -> dict[str, Any]:
        """Write the tensors, and return what belongs beside them."""
        buffers = (pair for model, _ in self.sides.values() for pair in model.named_buffers())
        if len(set(self.ranks.exchange(digest_of(buffers)))) > 1:
            raise UnsupportedError(
                "buffers of the model differ between ranks, and a checkpoint holds one of each. "
                "Replay without a folder, or on one rank."
            )
        tensors, states, plain = dict(self._of_models()), {}, {}
        for side, (_, optimizer) in self.sides.items():
            for index, parameter in enumerate(parameters_of(optimizer)):
                for name, value in optimizer.state.get(parameter, {}).items():
                    key = f"{side}/optimizer/{index}/{name}"
                    if isinstance(value, Tensor):
                        states[key] = {"device": value.device.type, "shape": list(value.shape)}
                        tensors[key] = _with_dimension(value)
                    elif value is None or isinstance(value, bool | int | float | str):
                        plain[key] = value
                    else:
                        raise UnsupportedError(
                            f"the optimizer {type(optimizer).__name__} keeps {name} as "
                            f"{type(value).__name__}; checkpoints hold tensors, numbers and text. "
                            "Replay without a folder, or with another optimizer."
                        )
        self._transfer(path, "written", tensors)
        hashes = self.ranks.exchange(dict(self._hashes(path)))
        return {
            "states": states,
            "plain": plain,
            "generators": self.ranks.exchange(_generators()),
            "files": {name: found for some in hashes for name, found in some.items()},
        }

    def _hashes(self, path: Path) -> Iterator[tuple[str, str]]:
        """This rank's part of the files with their SHA-256."""
        files = sorted(path.glob("*.safetensors"))
        for file in files[self.ranks.index :: self.ranks.size]:
            with file.open("rb") as opened:
                yield file.name, hashlib.file_digest(opened, "sha256").hexdigest()

    def _check_files(self, path: Path, expected: Mapping[str, str]) -> None:
        present = {file.name for file in path.glob("*.safetensors")}
        for name in sorted(expected.keys() ^ present):
            problem = "is missing" if name in expected else "does not belong to the checkpoint"
            raise ConfigError(f"{path / name} {problem}. {_AGAIN}")
        for name, found in self._hashes(path):
            if found != expected[name]:
                raise ConfigError(
                    f"{path / name} is damaged: it has SHA-256 {found}, and was written with "
                    f"{expected[name]}. {_AGAIN}"
                )

    def _expected(self, path: Path, facts: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors to read into, by name: those of the models, and empty ones of the optimizers.

        Names, shapes and dtypes in the files are compared first.
        """
        try:
            written = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
            found = {
                name: (tuple(header.size), header.properties.dtype)  # pyright: ignore
                for name, header in written.items()
            }
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path} is no checkpoint ({error!r}). {_AGAIN}") from error
        tensors = dict(self._of_models())
        for key, state in facts["states"].items():
            parameter, shape = self._parameter(path, key), tuple(state["shape"])
            if math.prod(shape) > max(1, parameter.numel()):
                raise ConfigError(
                    f"{path} has {short(key)} of shape {shape}, larger than its parameter of shape "
                    f"{tuple(parameter.shape)}. {_AGAIN}"
                )
            if state["device"] not in ("cpu", parameter.device.type):
                raise ConfigError(f"{path} has {short(key)} on {short(state['device'])}. {_AGAIN}")
            dtype = found.get(key, (None, torch.float32))[1]
            tensors[key] = (
                torch.zeros_like(parameter, dtype=dtype, device=state["device"]).detach()
                if shape == tuple(parameter.shape)
                else torch.zeros(shape or 1, dtype=dtype, device=state["device"])
            )
        for key in facts["plain"]:
            self._parameter(path, key)
        expected = {name: (tuple(t.shape) or (1,), t.dtype) for name, t in tensors.items()}
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                here, there = expected.get(name, "nothing"), found.get(name, "nothing")
                raise ConfigError(
                    f"{path} is the checkpoint of another model: {short(name)} is {there}, and "
                    f"here it is {here}. {_AGAIN}"
                )
        return tensors

    def _parameter(self, path: Path, key: str) -> nn.Parameter:
        """The parameter that a value of an optimizer's state belongs to."""
        found = _STATE.fullmatch(key)
        if found is not None and found[1] in self.sides:
            parameters = parameters_of(self.sides[found[1]][1])
            if int(found[2]) < len(parameters):
                return parameters[int(found[2])]
        raise ConfigError(f"{path} has {short(key)}, which is no state of these models. {_AGAIN}")

    def _put_back(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Set the state of the optimizers. The tensors of the models have been read in place."""
        states: dict[str, Any] = dict(facts["plain"])
        for key, state in facts["states"].items():
            states[key] = tensors[key] if state["shape"] else tensors[key].reshape(())
        for key, value in states.items():
            found = _STATE.fullmatch(key)
            assert found is not None
            optimizer = self.sides[found[1]][1]
            optimizer.state[parameters_of(optimizer)[int(found[2])]][found[3]] = value

    def _transfer(self, path: Path, done: str, tensors: dict[str, Tensor]) -> None:
        """Write tensors, or read into them."""
        options: dict[str, Any] = {
            "process_group": self.ranks.group,
            "no_dist": not self.ranks.is_sharded,
        }
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                if done == "read":
                    load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), **options)
                else:
                    numbers = _file_numbers(tensors)
                    writer = HuggingFaceStorageWriter(str(path), numbers, save_distributed=True)
                    save(tensors, storage_writer=writer, **options)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            if of_backend(cause):
                raise lost_rank(cause) from error
            raise ConfigError(
                f"the checkpoint {path} cannot be {done} on rank {rank}: {described(cause)} Look "
                "at the room on its disk, and at its permissions."
            ) from error
        except RuntimeError as error:
            raise lost_rank(error) from error

    def _of_models(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the models that training may change; frozen parameters are in the digest."""
        for side, (model, _) in self.sides.items():
            trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
            for name, tensor in (*trained, *model.named_buffers()):
                yield f"{side}/model/{name}", _with_dimension(tensor)


def _with_dimension(tensor: Tensor) -> Tensor:
    """A view of at least one dimension: the files have no tensors without."""
    return tensor.detach() if tensor.dim() else tensor.detach().reshape(1)


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of the file of each tensor. torch holds a file in memory while it writes it."""
    numbers, total = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + total // _FILE_BYTES
        total += tensor.numel() * tensor.element_size()
    return numbers


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of names, dtypes, shapes and bytes. Collective if tensors are sharded."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = full_tensor(tensor).detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of an optimizer, over all of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _generators() -> dict[str, Any]:
    """The states of this rank's random number generators, ready for JSON."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {
        "torch": {name: state.numpy().tobytes().hex() for name, state in states.items()},
        "python": random.getstate(),
        "numpy": _listed(np.random.get_state(legacy=False)),  # noqa: NPY002
    }


def _listed(value: Any) -> Any:
    """The same tree with arrays as lists."""
    if isinstance(value, dict):
        return {name: _listed(entry) for name, entry in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def _set_generators(path: Path, states: Mapping[str, Any]) -> None:
    try:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state(states["numpy"])  # noqa: NPY002
        for name, text in states["torch"].items():
            state = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
            if name == "cpu":
                torch.set_rng_state(state)
            elif torch.cuda.is_available():
                torch.cuda.set_rng_state(state)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(
            f"{path} has no states of random number generators: {described(error)} {_AGAIN}"
        ) from error
