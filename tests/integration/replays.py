"""Replays that tests interrupt, resume and change."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from commands import made_up_rollouts
from safetensors.torch import load_file

from forkpoint import RolloutBatch
from forkpoint.apps.replay.folder import CHECKPOINT, ROWS, STATE, ReplayFolder
from forkpoint.apps.replay.loop import replay
from forkpoint.testing import tiny_model


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def noisy(outputs: Any, batch: Any) -> torch.Tensor:
    """A loss that draws random numbers, so that generators have to be put back as well."""
    weights = torch.rand(len(outputs.logprobs), dtype=outputs.logprobs.dtype)
    return -(batch.trained(outputs.logprobs) * weights * batch.advantages).sum()


def run(folder: Path, *, steps: int = 2, resume: bool = True, **changes: Any) -> None:
    """The replay of these tests, in whatever process calls it."""
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "optimizer": adamw,
        "groups_per_step": 2,
        "schedule": "cosine",
        "warmup_steps": 1,
        "max_grad_norm": 0.5,
        "checkpoint_every": 2,
        **changes,
    }
    model = options.pop("model", None) or tiny_model("qwen3", dtype=torch.float32)
    batch = options.pop("batch", None) or RolloutBatch(made_up_rollouts())
    loss = options.pop("loss", noisy)
    replay(model, batch, loss, steps=steps, folder=ReplayFolder(folder, resume=resume), **options)


def without_times(value: Any) -> Any:
    """Rows without what a clock says; names of times end in ms."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k.rpartition("_")[2] != "ms"}
    return value


def rows(folder: Path) -> list[dict[str, Any]]:
    return [without_times(json.loads(line)) for line in (folder / ROWS).read_text().splitlines()]


def checkpoint_of(folder: Path) -> Path:
    """The one checkpoint of a folder."""
    (path,) = folder.glob(f"{CHECKPOINT}*")
    return path


def assert_same_end(folder: Path, expected: Path) -> None:
    """Bitwise, except times."""
    assert rows(folder) == rows(expected)
    paths = checkpoint_of(folder), checkpoint_of(expected)
    assert paths[0].name == paths[1].name
    found, other = (load_file(*path.glob("*.safetensors")) for path in paths)
    assert found.keys() == other.keys()
    for name, tensor in found.items():
        assert tensor.dtype == other[name].dtype, name
        one, two = (t.reshape(-1).view(torch.uint8) for t in (tensor, other[name]))
        assert torch.equal(one, two), name
    states = [json.loads((path / STATE).read_text()) for path in paths]
    for name in ("step", "on_cpu", "plain", "generators"):
        assert repr(states[0][name]) == repr(states[1][name]), name  # NaN equals NaN


def copy_of(folder: Path, path: Path) -> Path:
    return Path(shutil.copytree(folder, path))
