"""The benchmark of mixtures of experts: tiny shapes run, and rows say what they are."""

import json
from pathlib import Path

import pytest
import torch
from commands import Shell

from benchmarks.commands import main
from benchmarks.shapes import SHAPES
from benchmarks.steps import moe
from benchmarks.steps.moe_checks import BAR, OVER_DENSE
from benchmarks.steps.moe_experts import LONGEST, kept_elements, layer_parameters, layers_that_fit
from benchmarks.steps.stepper import Stepper

CELL = ("moe", "--tiny", "--blocks", "eager", "--layers", "1", "--only", "P2048-R2048-N8")


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys, main)


def rows_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def test_each_mode_on_any_device(shell: Shell, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    modes = ("none", "rollout", "batch-pass")
    options = (
        "--modes",
        *modes,
        "--microbatch",
        "96",
        "--dense-microbatch",
        "16384",
        "--repeats",
        "1",
        "--profile",
        "--unchecked",
    )
    done = shell(*CELL, *options, "--output", output)
    assert done.code == 0, done.err
    rows = rows_of(output)
    found = {(row["case"].split(" ")[-1], row["metric"]): row for row in rows}
    assert found["tiny-moe", "layers"]["value"] == 1
    for mode in modes:
        speed_up, dense = found[mode, "speed-up"], found[mode, "dense step"]
        ratio = dense["value"] / found[mode, "shared step"]["value"]
        assert speed_up["value"] == pytest.approx(ratio) and speed_up["baseline"] == "dense"
        share = found[mode, "share of bound"]["value"]
        assert share == pytest.approx(ratio / speed_up["bound"])
        assert "4 rollouts, scaled by 2" in dense["note"]
        assert found[mode, "shared nonfinite"]["value"] == 0
        assert found[mode, "microbatches"]["value"] > 1
    # Counts that are given take no pass; a pass of its own is counted.
    assert found["rollout", "speed-up"]["bound"] > 1.39
    assert ("rollout", "bound without the pass") not in found
    alone = found["batch-pass", "bound without the pass"]["value"]
    assert 1 < found["batch-pass", "speed-up"]["bound"] < alone
    assert found["rollout", "score pass"]["value"] > 0
    losses = [found[mode, "router loss"]["value"] for mode in modes[1:]]
    assert losses[0] == pytest.approx(losses[1], rel=0.2) and losses[0] > 0
    assert ("none", "router loss") not in found
    for side in ("shared", "dense"):
        assert ("none", f"{side} operator {LONGEST}") in found
    assert done.result["failed"] == []


def test_gradients_are_compared_first(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.steps.moe_checks.SEEDS", 1)
    output = tmp_path / "rows.jsonl"
    assert shell(*CELL, "--modes", "none", "--repeats", "1", "--output", output).code == 0
    rows = rows_of(output)
    bars = {row["metric"]: row for row in rows if row["bar"] == BAR}
    assert len(bars) == 6 and sum("routers" in metric for metric in bars) == 3
    assert all(0 < row["value"] < 1e-5 for row in bars.values())
    (over,) = (row["value"] for row in rows if row["bar"] == OVER_DENSE)
    assert over > 0
    timed = [place for place, row in enumerate(rows) if row["metric"] == "shared step"]
    assert timed and min(timed) > max(n for n, row in enumerate(rows) if row["bar"] == BAR)


def test_a_wrong_gradient_fails(shell: Shell, tmp_path: Path, monkeypatch) -> None:
    """Router losses that the shared step leaves out miss their bars."""
    from benchmarks.steps import moe_checks

    gradients, calls = moe_checks._gradients, []

    def without(policy, batch, router, *, given):
        calls.append(policy.config.sharing)
        if policy.config.sharing == "group":
            router = type(router)(load_balancing=0.0, z=0.0, scope=router.scope)
        return gradients(policy, batch, router, given=given)

    monkeypatch.setattr(moe_checks, "_gradients", without)
    monkeypatch.setattr(moe_checks, "_held_rows", lambda model, figure: iter(()))
    output = tmp_path / "rows.jsonl"
    done = shell(*CELL, "--modes", "none", "--repeats", "1", "--output", output)
    assert done.code == 1 and len(done.result["failed"]) == 6 and "group" in calls


def test_time_that_is_up_is_said(shell: Shell, tmp_path: Path) -> None:
    done = shell(*CELL, "--max-seconds", "0", "--output", tmp_path / "rows.jsonl")
    assert done.code == 0
    assert done.result["left_out"] == ["comparison of gradients", "P2048-R2048-N8"]


def test_memory_that_runs_out_is_planned_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = Stepper.step, []

    def once(self, policy, batch, plan=None):
        calls.append(policy.config.sharing)
        if policy.config.sharing == "group" and calls.count("group") == 1:
            raise torch.OutOfMemoryError
        return step(self, policy, batch, plan)

    monkeypatch.setattr(Stepper, "step", once)
    bench = moe.Moe(tiny=True, layers=1, blocks="eager", only=("P2048-R2048-N8",), unchecked=True)
    from benchmarks.runner import Deadline

    rows = {row.metric: row for row in bench.measure(Deadline(None)) if "none" in row.case}
    assert rows["planned again, memory ran out"].value == 1 and "speed-up" in rows


def test_the_count_of_layers() -> None:
    """Weights of the published model, and what one token leaves in the tiny one's layer."""
    sizes = SHAPES[moe.SHAPE]
    weights = 48 * layer_parameters(sizes) + 2 * sizes["vocab_size"] * sizes["hidden_size"]
    assert weights == pytest.approx(30.53e9, rel=1e-3)
    tiny = SHAPES["tiny-moe"]
    assert kept_elements(tiny) == 4 * (2 * 64 + 4 * 32) + 8 * 64 + 3 * 6 * 16
    assert layers_that_fit(tiny, torch.device("cpu")) == 2


def test_what_is_refused(shell: Shell) -> None:
    assert (
        "no case has N9 in its name; there are P8192-R2048-N32, "
        in shell("moe", "--tiny", "--only", "N9").err
    )
    assert "microbatch is 0" in shell("moe", "--tiny", "--microbatch", "0").err
