"""The benches of whole steps on a CPU, with a tiny model: they run, and rows say what they are."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.commands import main
from benchmarks.plots import draw_all, latest, read_rows
from benchmarks.steps.capacity import largest
from benchmarks.steps.stepper import Stepper
from benchmarks.steps.tree import REPEATS
from forkpoint import save_rollouts
from forkpoint.errors import ConfigError
from forkpoint.plan.program import PHASES
from forkpoint.rollouts.synthetic import synthetic_rollouts

TINY = ("--tiny", "--blocks", "eager", "--layers", "1", "--json")


def bench(
    what: str, folder: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[list[dict], dict]:
    """Rows of a bench and its JSON line."""
    folder.mkdir(exist_ok=True)
    output = folder / "rows.jsonl"
    assert main([what, *options, *TINY, "--output", str(output)]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert result["rows"] == len(rows)
    for row in rows:
        assert row["value"] == row["value"] and row["bench"] == what
        assert row["commit"] and row["command"] and row["versions"]["torch"]
    return rows, result


def values(rows: list[dict], metric: str) -> dict[str, float]:
    return {row["case"]: row["value"] for row in rows if row["metric"] == metric}


def test_step_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, result = bench("step-grid", tmp_path, capsys, "--counts", "4")
    assert not result["left_out"]
    speed_ups = [row for row in rows if row["metric"] == "speed-up"]
    # Four splits by one count, and the four cells where sharing gains least.
    assert len(speed_ups) == 8 and all(row["bound"] >= 1 for row in speed_ups)
    shared, dense = values(rows, "shared step"), values(rows, "dense step")
    for row in speed_ups:
        assert row["value"] == pytest.approx(dense[row["case"]] / shared[row["case"]])
        share = values(rows, "share of bound")[row["case"]]
        assert share == pytest.approx(row["value"] / row["bound"])
    phases = [values(rows, f"shared phase {phase}") for phase in PHASES]
    for case, ms in shared.items():
        assert 0 < sum(each[case] for each in phases) <= ms * 1.5
    assert any("4 rollouts, scaled by 1;" in (row["note"] or "") for row in rows)
    assert set(values(rows, "shared planning")) == set(shared)


def test_dense_says_what_it_was_scaled_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--counts", "4", "8", "--splits", "6144/6144")
    rows, _ = bench("step-grid", tmp_path, capsys, *options)
    notes = {row["case"]: row["note"] for row in rows if row["metric"] == "dense step"}
    assert "4 rollouts, scaled by 1;" in notes["eager 6144/6144 N=4"]
    assert "4 rollouts, scaled by 2;" in notes["eager 6144/6144 N=8"]
    for row in rows:
        if row["p20"] is not None:
            assert row["p20"] <= row["value"] <= row["p80"]


@pytest.mark.parametrize("what", ["memory"])
def test_splits_by_name(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = {"step-grid": "--counts", "memory": "--count"}[what]
    options = ("--splits", "10240/2048", "6144/6144", count, "4")
    rows, _ = bench(what, tmp_path, capsys, *options)
    assert {row["case"].split(" ")[1] for row in rows} == {"10240/2048", "6144/6144"}


@pytest.mark.slow
def test_predictions_stand_beside_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, _ = bench("step-grid", tmp_path, capsys, "--counts", "4", "--calibrate")
    assert (tmp_path / "rows.calibration.json").is_file()
    shared, predicted = values(rows, "shared step"), values(rows, "predicted step")
    ratios = [row for row in rows if row["metric"] == "predicted / measured time"]
    assert len(ratios) == len(shared) == len(predicted) == 8
    for row in ratios:
        assert row["value"] == pytest.approx(predicted[row["case"]] / shared[row["case"]])
        assert "measured on" in row["note"]


def test_time_that_is_up_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.jsonl"
    command = ["step-grid", *TINY, "--output", str(output), "--max-seconds", "0"]
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rows"] == 0 and len(result["left_out"]) == 20


@pytest.mark.parametrize("shape", ["qwen3-8b"])
def test_policy_update(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, _ = bench("policy-update", tmp_path, capsys, "--shape", shape)
    assert len(values(rows, "speed-up")) == 2
    plain, shared = values(rows, "dense log-probs"), values(rows, "shared log-probs")
    for row in (row for row in rows if row["metric"] == "log-probs speed-up"):
        assert row["value"] == pytest.approx(plain[row["case"]] / shared[row["case"]])
        assert row["bound"] > 1 and row["baseline"] == "dense"


def test_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, _ = bench("memory", tmp_path, capsys, "--count", "3")
    over = values(rows, "time over keep")
    assert len(over) == 12 and {case.split(" ")[-1] for case in over} == {
        *("keep", "offload", "recompute")
    }
    assert all(value == 1 for case, value in over.items() if case.endswith("keep"))
    # Longer prompts leave more to offload.
    out = list(values(rows, "offload out_bytes").values())
    assert len(out) == 4 and out == sorted(out) and out[0] > 0
    assert set(values(rows, "offload left_bytes").values()) == {0}


def test_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--most-tokens", "4096", "--long-prompt", "16384")
    rows, _ = bench("capacity", tmp_path, capsys, *options)
    # There is no cap on a CPU: everything trains up to where it is told to stop.
    assert set(values(rows, "largest total").values()) == {4096 // 64}
    errors = values(rows, "gradient over dense")
    assert len(errors) == 6 and max(errors.values()) < 1e-4
    assert max(errors.values()) > 0, "gradients were compared with themselves"
    assert list(values(rows, "prompt that trained").values()) == [256]
    alone, _ = bench(
        "capacity", tmp_path / "alone", capsys, *options, "--only", "longest", "for like"
    )
    cases = {row["case"].partition(" ")[2].partition(":")[0] for row in alone}
    assert cases == {"longest prompt", "like for like"}
    assert main(["capacity", *TINY, "--only", "shortest"]) == 2
    assert "no case has shortest in its name; there are: " in capsys.readouterr().err


def test_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts = synthetic_rollouts(
        groups=2, rollouts_per_group=4, prompt_tokens=64, response_tokens=16
    )
    save_rollouts(tmp_path / "rollouts.jsonl", rollouts)
    rows, _ = bench("tree", tmp_path, capsys, str(tmp_path / "rollouts.jsonl"))
    (ratio,) = (row for row in rows if row["metric"] == "speed-up")
    assert ratio["bound"] > 1.5 and "2 of 2 groups" in ratio["note"]
    each = [row["value"] for row in rows if row["metric"] == "dense step"]
    assert len(each) == 2
    (whole,) = (row["value"] for row in rows if row["metric"] == "dense step, sum")
    assert sum(each) == pytest.approx(whole)
    assert "at random" not in ratio["note"]


def test_no_group_of_a_tree_bench_has_gradients_of_nothing_but_zeros(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = synthetic_rollouts(
        groups=2, rollouts_per_group=4, prompt_tokens=64, response_tokens=16
    )
    first = rollouts[0].group_id
    equal = [replace(r, advantage=0.0) if r.group_id == first else r for r in rollouts]
    save_rollouts(tmp_path / "rollouts.jsonl", equal)
    norms: list[float] = []
    repeat = Stepper.repeat

    def watched(self, policy, batch, **options):
        timed = repeat(self, policy, batch, **options)
        norms.append(max(float(p.grad.abs().max()) for p in self.model.parameters()))
        return timed

    monkeypatch.setattr(Stepper, "repeat", watched)
    rows, _ = bench("tree", tmp_path, capsys, str(tmp_path / "rollouts.jsonl"))
    assert len(norms) == 2 * 2 * (1 + REPEATS) and min(norms) > 0
    (ratio,) = (row for row in rows if row["metric"] == "speed-up")
    assert "advantages of 1 groups were all 0, and drawn at random" in ratio["note"]


def test_without_a_gpu_only_the_tiny_shapes_run(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert main(["memory"]) == 2
    assert "--tiny" in capsys.readouterr().err


@pytest.mark.slow
def test_figures_are_drawn_from_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench("step-grid", tmp_path, capsys, "--counts", "4")
    cells = [
        {"bench": "memory", "case": "a", "metric": "peak of phase leaf drained over dense"},
        {"bench": "capacity", "case": "b", "metric": "largest total"},
        {"bench": "step-grid", "case": "c", "metric": "predicted / measured time"},
    ]
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**c, "value": 0.5, "bound": 0.4}) + "\n" for c in cells)
    folder = tmp_path / "figures"
    command = ["plot", str(tmp_path / "rows.jsonl"), "--output", str(folder), "--json"]
    assert main(command) == 0
    drawn = json.loads(capsys.readouterr().out)["figures"]
    names = ["step-grid", "memory", "capacity", "predicted"]
    assert drawn == [str(folder / f"{name}.svg") for name in names]
    assert all("<svg" in Path(path).read_text(encoding="utf-8")[:500] for path in drawn)


def test_the_last_row_of_a_figure_counts_unless_it_is_void() -> None:
    row = {"bench": "memory", "case": "a", "metric": "m"}
    rows = [
        {**row, "value": 1.0},
        {**row, "case": "b", "value": 2.0, "note": None},
        {**row, "value": 3.0, "note": "rows of 64 tokens"},
        {**row, "case": "b", "value": 4.0, "note": "void: something else ran"},
    ]
    assert [found["value"] for found in latest(rows)] == [3.0, 2.0]


def test_what_ran_out_of_memory_has_no_earlier_figures() -> None:
    row = {"bench": "step-grid", "case": "compiled 2048/10240 N=16", "bound": 2.0}
    speed = {**row, "metric": "speed-up", "value": 1.5}
    failed = {**row, "metric": "out of memory", "value": 1.0}
    other = {**speed, "case": "compiled 2048/10240 N=8"}
    assert latest([speed, other, failed]) == [other, failed]
    assert latest([failed, speed]) == [speed]
    assert latest([speed, {**failed, "note": "void: another process held it"}]) == [speed]


def test_a_failure_is_drawn_and_ways_that_do_not_compare_stand_apart(tmp_path: Path) -> None:
    grid = {"bench": "step-grid", "bound": 2.0}
    found = {"bench": "capacity", "metric": "largest total", "value": 1.0}
    rows = [
        {**grid, "case": "compiled 2048/10240 N=8", "metric": "speed-up", "value": 1.5},
        {**grid, "case": "compiled 2048/10240 N=16", "metric": "out of memory", "value": 1.0},
        {**found, "case": "compiled like for like: dense"},
        {**found, "case": "compiled like for like: offload"},
        {**found, "case": "compiled at their best: shared, chains"},
    ]
    texts = []
    for path in draw_all(rows, tmp_path):
        texts.append(re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text(encoding="utf-8")))
    assert "2048/10240: out of memory" in texts[0] and "16" in texts[0]
    assert "compiled like for like" in texts[1]
    assert "compiled at their best (nothing to compare with yet)" in texts[1]


ROW = {"bench": "step-grid", "case": "eager 2/8 N=4", "metric": "speed-up", "value": 1, "bound": 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"value": None}, "value is None; it takes a number"),
        ({"value": "1"}, "value is '1'"),
        ({"value": 1e300}, "value is 1e[+]300"),
        ({"bound": None}, "bound is None"),
        ({"bound": [2]}, "bound is .2."),
        ({"case": "eager N=4"}, "case is 'eager N=4'; it takes a mode, a split and N=count"),
        ({"case": "eager 2/8 N=x"}, "case is 'eager 2/8 N=x'"),
        ({"case": 4}, "case is 4; it takes text"),
        ({"note": 1}, "note is 1; it takes text, or null"),
        (
            {"bench": "memory", "metric": "peak of phase leaf drained over dense", "bound": None},
            "bound",
        ),
    ],
)
def test_what_is_no_row_is_refused(changes: dict, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps({**ROW, **changes})}\n")
    with pytest.raises(ConfigError, match=f"line 2 is not a row of a benchmark: {said}"):
        read_rows([path])


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for content in (b'{"bench": "memory"}', b"[" * 9_999, b"\xff", b"NaN", b"[]"):
        path.write_bytes(content + b"\n")
        with pytest.raises(ConfigError, match="line 1 is not a row"):
            read_rows([path])
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw_all([], tmp_path)


def test_names_of_cases_are_drawn_as_text(tmp_path: Path) -> None:
    """Formulas, markup, characters that no font has, and those that XML has not."""
    path = tmp_path / "rows.jsonl"
    hostile = r"$\frac{$ <b>&amp;]]> \u7d44" + "\x00\x1b\ud800\u202e" + "x" * 500
    rows = [
        {"bench": "capacity", "case": f"{hostile}: dense", "metric": "largest total", "value": 5},
        {**ROW, "case": "<b> $x^$ N=4"},
        {**ROW, "metric": "predicted / measured time", "bench": hostile},
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    drawn = draw_all(read_rows([path]), tmp_path)
    assert len(drawn) == 3
    for figure in drawn:
        ElementTree.parse(figure)


@pytest.mark.parametrize("limit", [0, 1, 15, 16, 17, 100, 1023, 1024, 5000])
@pytest.mark.parametrize("first", [1, 16, 90, 512, 9000])
def test_the_largest_that_fits(limit: int, first: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = largest(fits, first=first, most=1030, step=16)
    assert found == min(limit, 1024) // 16 * 16
    assert all(size % 16 == 0 and 0 < size <= 1024 for size in tried) and len(tried) < 14
    if abs(found - first) <= 16:
        assert len(tried) <= 4, "begun near the answer it does not take long"


def test_profiles_run_without_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "profile.jsonl"
    options = ["--shape", "tiny", "--layers", "1", "--cells", "96/32/4", "--json"]
    assert main(["profile-step", *options, "--output", str(output)]) == 0
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row["metric"] == "step"]
    assert len(steps) == 3 and all(row["value"] > 0 for row in steps)


def test_plans_that_were_not_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.jsonl"
    options = ["--shape", "tiny", "--cells", "96/32/4", "--leaf-tokens", "64", "--json"]
    assert main(["plan-variants", *options, "--output", str(output)]) == 0
    assert json.loads(capsys.readouterr().out)["cases"] == 4
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert len(values(rows, "speed-up")) == 4
    assert main(["plan-variants", "--cells", "96/32"]) == 2
    assert "cells has '96/32'; it takes prompt/response/count" in capsys.readouterr().err
