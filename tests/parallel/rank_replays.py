"""Replays of a small model that several ranks hold by fully_shard, for tests that end them."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from scenarios_of_ranks import group, sharded, tree
from torch import Tensor

from forkpoint import RolloutBatch
from forkpoint.apps.replay.folder import CHECKPOINT, ROWS, ReplayFolder
from forkpoint.apps.replay.loop import replay
from forkpoint.apps.replay.records import ReplayReport, ReplayStep
from forkpoint.losses import GRPO
from forkpoint.testing import lifted_upcasts, tiny_model

STEPS = 4


def rollouts() -> RolloutBatch:
    return RolloutBatch(
        [*group(0, 3, 20, 8), *group(1, 4, 14, 9), *tree(3, 4), *group(2, 5, 30, 12)]
    )


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def replayed(
    folder: Path,
    *,
    steps: int = STEPS,
    on_step: Callable[[ReplayStep], None] | None = None,
    model: Any = None,
    **changes: Any,
) -> ReplayReport:
    """The replay of these tests, on each rank; resumed where the folder has one."""
    torch.manual_seed(3)
    model = model or sharded(tiny_model("qwen3", dtype=torch.float64))
    options: dict[str, Any] = {
        "optimizer": adamw,
        "groups_per_step": 3,
        "baseline": False,
        "schedule": "cosine",
        "warmup_steps": 1,
        "max_grad_norm": 0.5,
        "checkpoint_every": 1,
        **changes,
    }
    folders = ReplayFolder(folder, resume=True)
    with lifted_upcasts(model):
        return replay(
            model,
            rollouts(),
            GRPO(clip=0.2),
            steps=steps,
            folder=folders,
            on_step=on_step,
            **options,
        )


def whole_state(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's one checkpoint."""
    (path,) = folder.glob(f"{CHECKPOINT}*")
    files = sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [without_times(json.loads(line)) for line in (folder / ROWS).read_text().splitlines()]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k.rpartition("_")[2] != "ms"}
    return value


def assert_same_end(folder: Path, expected: Path) -> None:
    """Bitwise, but for times."""
    assert rows(folder) == rows(expected)
    found, other = whole_state(folder), whole_state(expected)
    assert found.keys() == other.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, other[name]), name
    names = [sorted(p.relative_to(f) for p in f.rglob("*")) for f in (folder, expected)]
    assert names[0] == names[1]


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def leaves_at(step: int) -> Callable[[ReplayStep], None]:
    """Ends the process after a step, as a kill does."""

    def on_step(row: ReplayStep) -> None:
        if row.step == step:
            sys.stderr.flush()
            os._exit(9)

    return on_step
