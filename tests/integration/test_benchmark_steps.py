"""Benchmarks of whole steps on a CPU, with tiny models: they run, and rows say what they are."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Shell

from benchmarks.commands import main
from benchmarks.runner import Deadline
from benchmarks.shapes import make_vision_model, sizes_of
from benchmarks.steps.groups import Groups
from benchmarks.steps.images import encoder_bounds, image_group
from benchmarks.steps.stepper import Stepper
from forkpoint import ModelShape, save_rollouts
from forkpoint.plan import make_plan
from forkpoint.plan.pricing.calibration import FOLDER_VARIABLE
from forkpoint.plan.pricing.encoders import EncoderShape
from forkpoint.plan.program import PHASES
from forkpoint.rollouts.synthetic import synthetic_rollouts

TINY = ("--tiny", "--blocks", "eager", "--layers", "1")
Rows = dict[tuple[str, str], dict]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys, main)


def bench(shell: Shell, folder: Path, *arguments: object, code: int = 0) -> Rows:
    """Rows of a benchmark by case and metric, in their order."""
    output = folder / "rows.jsonl"
    done = shell(*arguments, "--output", output)
    assert done.code == code, done.err
    lines = output.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert done.result["rows"] == len(rows)
    for row in rows:
        assert row["value"] == row["value"] and row["bench"] == arguments[0]
        assert row["commit"] and row["command"] and row["versions"]["torch"]
    return {(row["case"], row["metric"]): row for row in rows}


def values(rows: Rows, metric: str) -> dict[str, float]:
    return {case: row["value"] for (case, name), row in rows.items() if name == metric}


@pytest.mark.slow
def test_groups(shell: Shell, tmp_path: Path) -> None:
    groups = ("--groups", "P6144-R6144-N8", "P8192-R131~2048-N4")
    rows = bench(shell, tmp_path, "groups", *groups, "--scores", *TINY)
    speed_ups, shared = values(rows, "speed-up"), values(rows, "shared step")
    names = [f"llama3-8b eager 1 layers {name}" for name in groups[1:]]
    assert list(speed_ups) == list(shared) == names
    for case, speed_up in speed_ups.items():
        dense, bound = rows[case, "dense step"], rows[case, "speed-up"]["bound"]
        assert speed_up == pytest.approx(dense["value"] / shared[case]) and bound >= 1
        assert rows[case, "share of bound"]["value"] == pytest.approx(speed_up / bound)
        phases = sum(rows[case, f"shared phase {phase}"]["value"] for phase in PHASES)
        assert 0 < phases <= shared[case] * 1.5
        assert rows[case, "shared nonfinite"]["value"] == 0
        ratio = rows[case, "dense log-probs"]["value"] / rows[case, "shared log-probs"]["value"]
        assert rows[case, "log-probs speed-up"]["value"] == pytest.approx(ratio)
        assert rows[case, "log-probs speed-up"]["bound"] > 1
    assert "4 rollouts, scaled by 2;" in rows[names[0], "dense step"]["note"]


def test_gradients_that_are_not_finite_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat = Stepper.repeat

    def spoiled(self, policy, batch, **options):
        timed = repeat(self, policy, batch, **options)
        if len(batch) == 8:
            self.model.model.layers[0].mlp.up_proj.weight.grad[0] = float("nan")
        return timed

    monkeypatch.setattr(Stepper, "repeat", spoiled)
    made = Groups(tiny=True, layers=1, blocks="eager", groups=("P128-R128-N8",))
    rows = {row.metric: row for row in made.measure(Deadline(None))}
    assert rows["shared nonfinite"].failed
    assert rows["shared nonfinite"].note == "not finite are model.layers.0.mlp.up_proj.weight"


def test_tree(shell: Shell, tmp_path: Path) -> None:
    made = synthetic_rollouts(groups=2, rollouts_per_group=4, prompt_tokens=64, response_tokens=16)
    save_rollouts(tmp_path / "rollouts.jsonl", made)
    rows = bench(shell, tmp_path, "tree", tmp_path / "rollouts.jsonl", *TINY)
    (ratio,) = (row for (_, metric), row in rows.items() if metric == "speed-up")
    assert ratio["bound"] > 1.5 and "2 of 2 groups" in ratio["note"]
    each = values(rows, "dense step").values()
    (whole,) = values(rows, "dense step, sum").values()
    assert len(each) == 2 and sum(each) == pytest.approx(whole)


@pytest.mark.slow
def test_capacity(shell: Shell, tmp_path: Path) -> None:
    """With the prefix cache in host memory a step has longer rollouts."""
    small = ("--device-memory", "3MiB", "--reserve", "1KiB", "--step-tokens", 64)
    rows = bench(
        shell, tmp_path, "capacity", *small, "--most-tokens", 2048, *TINY[:3], "--layers", 4
    )
    totals = {case.rpartition(" ")[2]: n for case, n in values(rows, "largest total").items()}
    assert 0 < totals["device"] < totals["host"]
    ratios = values(rows, "largest total over dense")
    assert {case.rpartition(" ")[2] for case in ratios} == {"device", "host"}
    (moved,) = values(rows, "bytes copied").values()
    assert moved > 0
    errors = values(rows, "gradient over dense's in float32")
    assert all(value < 1e-4 for case, value in errors.items() if case.endswith("float32"))
    (dense, *shared) = [value for case, value in errors.items() if case.endswith("bfloat16")]
    assert len(shared) == 2 and max(shared) < 1.2 * dense


def test_defaults(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    made = synthetic_rollouts(groups=5, rollouts_per_group=2, prompt_tokens=24, response_tokens=8)
    made = [replace(rollout, token_ids=rollout.token_ids + 1000) for rollout in made]
    save_rollouts(tmp_path / "rag.jsonl", made)
    options = ("--loads", "long", "rag", "--folder", tmp_path, "--repeats", 1)
    rows = bench(shell, tmp_path, "defaults", *options, *TINY)
    assert {"default over dense", "default over the best"} <= {metric for _, metric in rows}
    assert "qwen3-1.7b rag 4" in values(rows, "none")
    assert rows["qwen3-1.7b", "second step done"]["value"] > 0
    assert values(rows, "none")["qwen3-1.7b long"] > 0


@pytest.mark.slow
def test_router_losses(shell: Shell, tmp_path: Path) -> None:
    routers = ("none", "rollout", "batch-pass")
    options = ("--shape", "qwen3-30b-a3b", "--groups", "P2048-R2048-N8", "--routers", *routers)
    rows = bench(shell, tmp_path, "groups", *options, *TINY)
    found = {(case.split(" ")[-1], metric): row for (case, metric), row in rows.items()}
    assert all(found[router, "speed-up"]["bound"] > 1 for router in routers)
    assert found["rollout", "score pass"]["value"] > 0
    assert ("batch-pass", "score pass") not in found


@pytest.mark.slow
def test_images(shell: Shell, tmp_path: Path) -> None:
    options = ("--visual", "2000", "--text", "6400", "--repeats", "1")
    rows = bench(shell, tmp_path, "images", *options, *TINY)
    for encoder in ("trained", "frozen"):
        case = next(case for case, _ in rows if f"encoder {encoder}" in case)
        step = {name: rows[case, f"{name} step"]["value"] for name in ("plain loop", "forkpoint")}
        faster = rows[case, "faster than plain loop"]
        assert faster["value"] == pytest.approx(step["plain loop"] / step["forkpoint"])
        once = rows[case, "bound, encoder once"]["value"]
        assert once >= faster["bound"] > rows[case, "bound, encoder for every rollout"]["value"] > 1


@pytest.mark.slow
def test_bounds_of_images() -> None:
    """Counted here again for Qwen3-VL-8B: products of weights, and attention within images."""
    config = make_vision_model("qwen3-vl-8b", "meta").config
    batch = image_group(config, images=8, grid=(50, 80), text=200, lengths=[300] * 8)
    shape = ModelShape.from_config(sizes_of("qwen3-8b"))
    # A patch embedding, 27 blocks, a merger of four patches and three more for deeper features.
    width, four = 1152, 4 * 1152
    weights = 3 * 2 * 16 * 16 * width + 27 * (4 * width * width + 2 * width * 4304)
    weights += 4 * (four * four + four * 4096)
    plan = make_plan(batch, shape)
    for trained, once, every in ((True, 6.54, 2.58), (False, 6.29, 3.93)):
        encoder = EncoderShape(weights, 27, width, 4.0, 0, 0, trained=trained)
        plan = replace(plan, capabilities=replace(plan.capabilities, encoder=encoder))
        found = encoder_bounds(plan, batch)
        assert round(found["once"], 2) == once and round(found["every"], 2) == every
        again = encoder_bounds(replace(plan, encodes_again=True), batch)
        assert again["plan"] < again["once"] == found["once"] == found["plan"]
