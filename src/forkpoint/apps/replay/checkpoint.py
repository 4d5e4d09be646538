"""Checkpoints of a replay: safetensors of whole tensors, and a state.json with everything else.

A checkpoint is a folder, `checkpoint-00000012` after 12 steps, with tensors in files of at most a
few GiB. Tensors come back bit by bit: optimizer state is put into the optimizer as it was, because
`load_state_dict` would cast it to the parameters' dtype.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from forkpoint.apps.replay.folder import ReplayFolder
from forkpoint.apps.replay.records import ReplayStep
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.parallel.step import described
from forkpoint.rollouts.batch import short

Side = tuple[nn.Module, torch.optim.Optimizer]
_STATE = re.compile(r"(\w+)/optimizer/(0|[1-9]\d{0,8})/(.+)", re.ASCII | re.DOTALL)
_AGAIN = "Begin anew in another folder."
_FILE_BYTES = 1 << 31


class Checkpoints:
    """The state that a step changes, saved in a replay's folder.

    Args:
        folder: of the replay.
        sides: the models with their optimizers, by name.
    """

    def __init__(self, folder: ReplayFolder, sides: Mapping[str, Side]) -> None:
        self.folder = folder
        self.sides = sides

    def save(self, step: int) -> None:
        """Make the state after `step` steps the checkpoint.

        Raises:
            UnsupportedError: an optimizer keeps state that is neither tensors nor plain values.
            ConfigError: the files cannot be written.
        """
        state = self._write(self.folder.begin_checkpoint())
        self.folder.finish_checkpoint(step, state)

    def restore(self) -> list[ReplayStep]:
        """Put the last checkpoint back, and return the steps up to it; none without a checkpoint.

        Raises ConfigError, before anything changes, unless it is whole and fits the models.
        """
        found = self.folder.last_checkpoint()
        steps: list[ReplayStep] = []
        if found is not None:
            path, state, steps = found
            _check_files(path, state["files"])
            self._check(path, state)
            self._read(path, state)
        self.folder.cut(len(steps))
        return steps

    def _write(self, path: Path) -> dict[str, Any]:
        """Write the tensors, and return what belongs beside them."""
        plain, on_cpu, tensors = {}, [], self._of_models()
        for side, (_, optimizer) in self.sides.items():
            for index, parameter in enumerate(parameters_of(optimizer)):
                for name, value in optimizer.state.get(parameter, {}).items():
                    key = f"{side}/optimizer/{index}/{name}"
                    if isinstance(value, Tensor):
                        tensors[key] = value
                        if value.device.type == "cpu" != parameter.device.type:
                            on_cpu.append(key)
                    elif value is None or isinstance(value, bool | int | float | str):
                        plain[key] = value
                    else:
                        raise UnsupportedError(
                            f"the optimizer keeps {name} as {type(value).__name__}; checkpoints "
                            "hold tensors, numbers and text. Replay without a folder, or with "
                            "another optimizer."
                        )
        files = self._write_tensors(path, tensors)
        return {"files": files, "plain": plain, "on_cpu": on_cpu, "generators": _generators()}

    def _write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Write files of tensors, and return their SHA-256."""
        files: dict[str, str] = {}
        held: dict[str, Tensor] = {}
        try:
            for number, (key, tensor) in enumerate(tensors.items(), start=1):
                held[key] = tensor.detach().to("cpu", copy=True).contiguous()
                if sum(t.nbytes for t in held.values()) >= _FILE_BYTES or number == len(tensors):
                    file = path / f"{len(files):05d}.safetensors"
                    save_file(held, file)
                    files[file.name] = _sha256(file)
                    held = {}
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"the checkpoint {path} cannot be written: {described(error)} Look at the room on "
                "its disk, and at its permissions."
            ) from error
        return files

    def _check(self, path: Path, state: Mapping[str, Any]) -> None:
        """Compare names and shapes with the models', and set the random generators."""
        expected = {key: list(tensor.shape) for key, tensor in self._of_models().items()}
        found = {key: file.get_slice(key).get_shape() for file, key in _saved(path, state)}
        for key in (*(found.keys() - expected.keys()), *state["plain"]):
            self._parameter(path, key)
        for key, shape in expected.items():
            if found.get(key) != shape:
                raise ConfigError(
                    f"{path} is the checkpoint of another model: {short(key)} has the shape "
                    f"{found.get(key, 'nothing')}, and here it has {shape}. {_AGAIN}"
                )
        try:
            _set_generators(state["generators"])
        except (LookupError, ValueError, TypeError, RuntimeError) as error:
            raise ConfigError(
                f"{path} has no states of random number generators: {described(error)} {_AGAIN}"
            ) from error

    @torch.no_grad()
    def _read(self, path: Path, state: Mapping[str, Any]) -> None:
        models = self._of_models()
        for file, key in _saved(path, state):
            value = file.get_tensor(key)
            if key in models:
                models[key].copy_(value)
                continue
            states, name, parameter = self._parameter(path, key)
            states[name] = value if key in state["on_cpu"] else value.to(parameter.device)
        for key, value in state["plain"].items():
            states, name, _ = self._parameter(path, key)
            states[name] = value

    def _parameter(self, path: Path, key: str) -> tuple[dict[str, Any], str, nn.Parameter]:
        """Where a value of an optimizer's state belongs: the state, its name, the parameter."""
        found = _STATE.fullmatch(key)
        if found is not None and found[1] in self.sides:
            optimizer = self.sides[found[1]][1]
            parameters = parameters_of(optimizer)
            if int(found[2]) < len(parameters):
                parameter = parameters[int(found[2])]
                return optimizer.state[parameter], found[3], parameter
        raise ConfigError(f"{path} has {short(key)}, which is no state of these models. {_AGAIN}")

    def _of_models(self) -> dict[str, Tensor]:
        """Tensors of the models that training may change; frozen parameters are in the digest."""
        return {
            f"{side}/model/{name}": tensor.detach()
            for side, (model, _) in self.sides.items()
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        }


def _check_files(path: Path, expected: Mapping[str, str]) -> None:
    present = {file.name for file in path.glob("*.safetensors")}
    for name in sorted(expected.keys() ^ present):
        problem = "is missing" if name in expected else "does not belong to the checkpoint"
        raise ConfigError(f"{path / name} {problem}. {_AGAIN}")
    for name, wanted in expected.items():
        if (found := _sha256(path / name)) != wanted:
            raise ConfigError(
                f"{path / name} is damaged: it has SHA-256 {found}, and was written with "
                f"{wanted}. {_AGAIN}"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _saved(path: Path, state: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """The names of a checkpoint's tensors, each with the opened file that has it.

    Raises ConfigError for a file that is not safetensors.
    """
    for name in state["files"]:
        try:
            with safe_open(path / name, framework="pt") as file:
                yield from ((file, key) for key in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} is no checkpoint ({error!r}). {_AGAIN}") from error


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of names, dtypes, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of an optimizer, over all of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _generators() -> dict[str, str]:
    """The states of torch's random number generators, in hexadecimal digits."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.numpy().tobytes().hex() for name, state in states.items()}


def _set_generators(states: Mapping[str, str]) -> None:
    found = {
        name: torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
        for name, text in states.items()
    }
    torch.set_rng_state(found["cpu"])
    if torch.cuda.is_available() and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"])
