"""Replays of mixtures of experts: router losses, loads of experts by layer, and given routes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from replays import assert_same_end, run
from router_losses import ragged_batch, routed_model
from test_replayed_routes import routed_batch

from forkpoint import Config, ConfigError, RolloutBatch, UnsupportedError
from forkpoint.apps.replay.folder import ReplayFolder
from forkpoint.apps.replay.loop import replay
from forkpoint.apps.replay.records import ReplayStep
from forkpoint.apps.report.chapters import read_run, replay_chapter
from forkpoint.apps.report.figure import Figure
from forkpoint.losses import GRPO, RouterLoss
from forkpoint.testing import tiny_model

ACROSS = Config(
    sharing="tree", boundary="across", max_microbatch_tokens=12, compile_blocks=False,
    self_check=False,
)  # fmt: skip
ROUTER = RouterLoss(load_balancing=0.5, z=0.01)


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def replayed(batch: RolloutBatch, folder: Path | None = None, **changes: Any) -> list[ReplayStep]:
    torch.manual_seed(3)
    options: dict[str, Any] = {"optimizer": sgd, "steps": 2, "groups_per_step": 3, **changes}
    model = options.pop("model", None) or routed_model("qwen3_moe")
    made = None if folder is None else ReplayFolder(folder)
    return list(replay(model, batch, GRPO(), config=ACROSS, folder=made, **options).steps)


def experts_of(folder: Path) -> Figure:
    return next(f for f in replay_chapter(read_run(folder)).figures if f.name == "experts")


def test_loads_and_routes_are_recorded_and_drawn(tmp_path: Path) -> None:
    batch = routed_batch()
    steps = replayed(batch, tmp_path / "run", router=ROUTER, baseline=True)
    assert batch.routed_experts is not None
    given = int((batch.routed_experts[..., 0] >= 0).sum())
    for step in steps:
        assert step.dense is not None and step.dense.experts is not None
        assert step.shared.experts is not None and step.shared.routes is not None
        assert step.shared.experts.logical == step.dense.experts.logical
        assert step.dense.experts.computed == step.dense.experts.logical, "dense runs each token"
        assert [load.total for load in step.shared.experts.logical] == [
            2 * batch.logical_tokens
        ] * 2
        assert [load.total for load in step.shared.experts.computed] == [
            2 * step.shared.computed_tokens
        ] * 2
        assert sum(step.shared.routes.decisions) == given
        assert step.shared.routes == step.dense.routes
        assert step.shared.router_loss == pytest.approx(step.dense.router_loss, rel=1e-6)
    figure = experts_of(tmp_path / "run")
    assert [chart.y_label for chart in figure.pictures] == [
        "load over the even share",
        "tokens off their given route, %",
        "router loss",
    ]
    assert [chart.x_label for chart in figure.pictures] == ["layer", "layer", "step"]
    loads = [step.shared.experts for step in steps]
    most = dict(zip(figure.table.columns, zip(*figure.table.rows, strict=True), strict=True))
    for layer in range(2):
        wanted = [8 * one.logical[layer].most / one.logical[layer].total for one in loads if one]
        assert most["most over mean, logical"][layer] == pytest.approx(sum(wanted) / 2)
    assert sum(most["given routes, all steps"]) == 2 * given
    rows = [json.loads(line) for line in (tmp_path / "run/rows.jsonl").read_text().splitlines()]
    assert [ReplayStep.from_dict(row) for row in rows] == steps


def test_nothing_is_counted_unless_it_was_asked_for(tmp_path: Path) -> None:
    plain = replayed(ragged_batch(), tmp_path / "run", steps=1)
    row = json.loads((tmp_path / "run/rows.jsonl").read_text())
    assert not {"router_loss", "experts", "routes"} & row["shared"].keys()
    assert "experts" not in [f.name for f in replay_chapter(read_run(tmp_path / "run")).figures]
    counted = replayed(ragged_batch(), tmp_path / "counted", steps=1, expert_counts=True)
    assert counted[0].shared.experts is not None and counted[0].shared.router_loss is None
    assert counted[0].shared.loss == pytest.approx(plain[0].shared.loss, rel=1e-12)
    assert experts_of(tmp_path / "counted").pictures[0].x_label == "layer"


def test_a_model_that_adds_a_router_loss_needs_one() -> None:
    model = routed_model("qwen3_moe", output_router_logits=True)
    with pytest.raises(UnsupportedError, match=r"output_router_logits=True"):
        replayed(ragged_batch(), model=model)
    (step,) = replayed(ragged_batch(), model=model, steps=1, router=RouterLoss())
    assert step.shared.router_loss is not None and step.shared.router_loss > 0
    with pytest.raises(UnsupportedError, match="the model has no routers"):
        replayed(ragged_batch(), model=tiny_model("qwen3"), router=RouterLoss(0.1))


@pytest.mark.slow
def test_a_replay_with_a_router_loss_goes_on_bitwise(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(step: ReplayStep) -> None:
        if step.step == 3:
            raise Stop

    options: dict[str, Any] = {
        "batch": ragged_batch(), "loss": GRPO(), "router": ROUTER, "config": ACROSS, "steps": 4,
    }  # fmt: skip
    for folder in ("whole", "resumed"):
        if folder == "resumed":
            with pytest.raises(Stop):
                run(tmp_path / folder, model=routed_model("qwen3_moe"), on_step=stop, **options)
            changed = {**options, "router": RouterLoss(load_balancing=0.5, z=0.02)}
            with pytest.raises(ConfigError, match=r"router\.z was 0\.01 and is now 0\.02"):
                run(tmp_path / folder, model=routed_model("qwen3_moe"), **changed)
            with pytest.raises(ConfigError, match=r"router was .* and is now 'nothing'"):
                run(
                    tmp_path / folder,
                    model=routed_model("qwen3_moe"),
                    **{**options, "router": None},
                )
        run(tmp_path / folder, model=routed_model("qwen3_moe"), **options)
    assert_same_end(tmp_path / "resumed", tmp_path / "whole")
