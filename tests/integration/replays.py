"""Replays that tests interrupt and resume."""

import json
from pathlib import Path
from typing import Any

import torch
from commands import made_up_rollouts

from forkpoint import RolloutBatch
from forkpoint.apps.replay.folder import CHECKPOINT, ROWS
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
    replay(model, batch, loss, steps=steps, output=folder, resume=resume, **options)


def without_times(value: Any) -> Any:
    """Rows without what a clock says; names of times end in ms."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k.rpartition("_")[2] != "ms"}
    return value


def rows(folder: Path) -> list[dict[str, Any]]:
    return [without_times(json.loads(line)) for line in (folder / ROWS).read_text().splitlines()]


def state_of(folder: Path) -> dict[str, Any]:
    """The checkpoint of a folder, without its rows."""
    state = torch.load(folder / CHECKPOINT, weights_only=True)
    del state["rows"]
    return state


def assert_same_end(folder: Path, expected: Path) -> None:
    """Bitwise, except times."""
    assert rows(folder) == rows(expected)
    torch.testing.assert_close(state_of(folder), state_of(expected), rtol=0, atol=0, equal_nan=True)
