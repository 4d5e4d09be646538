"""The answer on gradients at the top of a replay's report, for replays that are right or broken."""

from pathlib import Path

import pytest
import torch
from commands import made_up_rollouts
from sabotage import Sabotage, dropped_boundary_gradient, restarted_positions, wrong_lse

from forkpoint import Config, RolloutBatch
from forkpoint.apps.replay.folder import ReplayFolder
from forkpoint.apps.replay.loop import replay
from forkpoint.apps.report.replay import read_run, replay_chapter
from forkpoint.losses import GRPO
from forkpoint.testing import tiny_model


@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        (None, "yes"),
        (dropped_boundary_gradient, "no"),
        (restarted_positions, "no"),
        (wrong_lse, "no"),
    ],
    ids=["as it is", "dropped boundary gradient", "restarted positions", "wrong log-sum-exp"],
)
def test_a_broken_boundary_is_seen(
    sabotage: Sabotage | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if sabotage is not None:
        sabotage(monkeypatch)
    replay(
        tiny_model("qwen3", dtype=torch.float32),
        RolloutBatch(made_up_rollouts(groups=1)),
        GRPO(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        steps=1,
        config=Config(
            sharing="group",
            boundary="across",
            max_microbatch_tokens=32,
            compile_blocks=False,
            self_check=False,
        ),
        folder=ReplayFolder(tmp_path / "run"),
        about={"options": {"dtype": "float32"}},
    )
    answer = replay_chapter(read_run(tmp_path / "run")).tiles[0]
    assert answer.value == f"gradients match: {said}", answer.remark
