"""Replays on several ranks, and the folders that they write."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bad_inputs.kind import Kind
from bad_inputs.traces import REPLAY
from forkpoint import Rollout, RolloutBatch
from forkpoint.apps.replay.folder import STATE, read_state
from forkpoint.apps.replay.loop import replay
from forkpoint.apps.replay.ranks import check_same
from forkpoint.errors import ConfigError, ForkpointError, RankError, UnsupportedError
from forkpoint.hosts.libraries import library_of
from forkpoint.losses import GRPO
from forkpoint.parallel.group import RankGroup, lost_rank
from forkpoint.plan.stages import stages_of_layers
from forkpoint.testing import tiny_model

SAVED = Path("out/checkpoint-00000002")


def on_ranks(patch: pytest.MonkeyPatch) -> None:
    """The variables that torchrun sets."""
    for name in ("RANK", "LOCAL_RANK"):
        patch.setenv(name, "0")
    patch.setenv("WORLD_SIZE", "2")
    patch.setenv("MASTER_ADDR", "127.0.0.1")
    patch.setenv("MASTER_PORT", "1")


def saved(content: dict[str, Any] | None) -> Callable[[], object]:
    """Reads a checkpoint that has this in the file beside its shards, or that lacks the file."""

    def call() -> None:
        SAVED.mkdir(parents=True, exist_ok=True)
        if content is not None:
            (SAVED / STATE).write_text(json.dumps(content))
        read_state(SAVED)

    return call


def different() -> None:
    ranks = SimpleNamespace(names=(0, 1), exchange=lambda own: [own, {"steps": "5"}])
    check_same(cast(RankGroup, ranks), {"steps": 4})


def died() -> None:
    error = lost_rank(RuntimeError("[third_party/gloo/pair.cc:534] Connection closed by peer"))
    assert isinstance(error, ForkpointError)
    raise error


def a_stage() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    library_of(model).entry(model, ()).hold_stage(stages_of_layers([range(1), range(1, 2)], 2)[0])
    batch = RolloutBatch([Rollout([1, 2, 3], [0, 1, 1], 1.0)])
    replay(model, batch, GRPO(), optimizer=torch.optim.AdamW, steps=1, baseline=False)


RANK_REPLAYS = (
    Kind(
        name="A replay of a stage of a pipeline",
        error=UnsupportedError,
        message="the model holds a stage of a pipeline (1 of 2 layers), and replay trains whole "
        "models. Give it the whole model, under fully_shard on several ranks, or train the stages "
        "by policy.forward_backward of wrap(model, mesh=mesh).",
        call=a_stage,
    ),
    Kind(
        name="A baseline on several ranks",
        error=ConfigError,
        message="baseline is 'dense', which trains a copy of the model, and torchrun has started",
        argv=(*REPLAY, "--baseline", "dense"),
        prepare=on_ranks,
    ),
    Kind(
        name="Ranks that replay different things",
        error=ConfigError,
        message="the ranks replay different things: steps is '4' on rank 0 and '5' on rank 1.",
        call=different,
    ),
    Kind(
        name="A rank that has died in a replay",
        error=RankError,
        message="a rank has died or ended: look at the output of the other ranks.",
        call=died,
    ),
    Kind(
        name="A checkpoint that is cut short",
        error=ConfigError,
        message="is no whole checkpoint: it has no state.json.",
        call=saved(None),
    ),
)
