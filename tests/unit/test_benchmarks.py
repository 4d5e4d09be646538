"""Benchmarks: their command line, rows, and the figures and pages that are made from rows."""

import json
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from benchmarks import commands
from benchmarks.commands import APP, COMMANDS, main
from benchmarks.plots import draw_all, latest, read_rows
from benchmarks.results_page import PAGE, README, RESULTS, page, with_tables
from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline
from forkpoint.apps.cli.app import App
from forkpoint.apps.replay.trend import LIMIT, trend
from forkpoint.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_every_benchmark_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A class of a benchmark that no name leads to could not be run."""
    kinds = {name: APP.command(name) for name in COMMANDS}
    assert main([]) == 0
    assert set(re.findall(r"^ ([a-z-]+) +\w", capsys.readouterr().out, re.M)) == set(kinds)
    found = {kind for kind in Benchmark.__subclasses__() if kind.__module__ != __name__}
    assert {kind for kind in found if "NAME" in vars(kind)} <= set(kinds.values())
    for name, kind in kinds.items():
        assert getattr(kind, "NAME", name) == name
        assert main([name, "--help"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["attentoin"], "there is no command 'attentoin'; there are attention, "),
        (["hybrid"], "torch sees no CUDA device here; run it on a machine with"),
        (["attention", "--kernels", "flashy"], "kernels has 'flashy'; allowed are fa4, "),
        (["attention", "--only", "R640"], "no case of dualkv, prompt-caching, ragged, small has"),
        (["attention", "--output", "none/rows.jsonl"], "which is a folder or lies in none"),
        (["hybrid", "--suite", "smoke", "--only", "R640"], "no case has R640 in its name; there"),
        (["step-grid", "--tiny", "--layers", "0"], "layers is 0"),
        (["trl", "--rows", "5"], "rows is 5, and a step has 4 * 8 completions; give a divisor"),
        (["plot"], "these rows hold nothing to draw"),
    ],
    ids=" ".join,
)
def test_what_is_refused(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out and not list(tmp_path.iterdir())


@dataclass(frozen=True, kw_only=True)
class Made(Benchmark):
    """Rows that are made up.

    Attributes:
        value: What is measured.
    """

    NAME: ClassVar[str] = "made"

    value: float = 1.0

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        yield ResultRow(bench="made", case="a", metric="m", unit="ms", value=self.value, bar=2.0)
        if not deadline.over("the second"):
            yield ResultRow(bench="made", case="b", metric="m", unit="ms", value=5.0)


@pytest.mark.parametrize(
    ("options", "code", "result"),
    [
        (("--value", "2"), 0, {"rows": 2, "failed": [], "left_out": []}),
        (("--value", "2.5"), 1, {"rows": 2, "failed": ["a: m"], "left_out": []}),
        (("--value", "nan"), 1, {"rows": 2, "failed": ["a: m"], "left_out": []}),
        (("--max-seconds", "0"), 0, {"rows": 1, "failed": [], "left_out": ["the second"]}),
    ],
)
def test_rows_and_codes(
    options: tuple[str, ...],
    code: int,
    result: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A figure above its bar fails, and what there was no time for is named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(App, "command", lambda *_: Made)
    assert commands.main(["made", *options, "--json"]) == code
    assert json.loads(capsys.readouterr().out).items() >= result.items()
    lines = (tmp_path / "made.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["case"] for row in rows] == ["a", "b"][: len(rows)]
    assert all(row["commit"] and row["versions"]["torch"] and row["device"] for row in rows)


# Figures and pages --------------------------------------------------------------------------------


def test_the_last_row_of_a_figure_counts_unless_it_is_void() -> None:
    row = {"bench": "memory", "case": "a", "metric": "m"}
    rows = [
        {**row, "value": 1.0},
        {**row, "case": "b", "value": 2.0, "note": None},
        {**row, "value": 3.0, "note": "rows of 64 tokens"},
        {**row, "case": "b", "value": 4.0, "note": "void: something else ran"},
    ]
    assert [found["value"] for found in latest(rows)] == [3.0, 2.0]
    failed = {**row, "metric": "out of memory", "value": 1.0}
    assert latest([rows[0], rows[1], failed]) == [rows[1], failed]
    assert latest([failed, rows[0]]) == [rows[0]]


def test_figures_are_drawn_from_rows(tmp_path: Path) -> None:
    """A failure is drawn, and ways that do not compare stand apart; names are text."""
    grid = {"bench": "step-grid", "bound": 2.0}
    found = {"bench": "capacity", "metric": "largest total", "value": 1.0}
    peak = {"bench": "memory", "metric": "peak of phase leaf drained over dense"}
    rows = [
        {**grid, "case": "compiled 2048/10240 N=8", "metric": "speed-up", "value": 1.5},
        {**grid, "case": "compiled 2048/10240 N=16", "metric": "out of memory", "value": 1.0},
        {**peak, "case": "x", "value": 0.5, "bound": 0.4},
        {**found, "case": "compiled like for like: dense"},
        {**found, "case": "compiled like for like: offload"},
        {**found, "case": "compiled at their best: shared, chains $x^"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    drawn = draw_all(read_rows([tmp_path / "rows.jsonl"]), tmp_path / "figures")
    assert [path.name for path in drawn] == ["step-grid.svg", "memory.svg", "capacity.svg"]
    texts = [
        re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))
        for path in drawn
    ]
    assert "2048/10240: out of memory" in texts[0] and "16" in texts[0]
    assert "compiled like for like" in texts[2] and "shared, chains $x^" in texts[2]
    assert "compiled at their best (nothing to compare with yet)" in texts[2]


@pytest.mark.parametrize(
    "line", [b"[]", b"[" * 9_999, b"\xff", b'{"bench": "a", "case": "b", "metric": "c"}']
)
def test_what_is_no_row_is_refused(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = b'{"bench": "a", "case": "b", "metric": "c", "value": 1}'
    path.write_bytes(b"\n".join((row, line)))
    with pytest.raises(ConfigError, match="line 2 is not a row of a benchmark"):
        read_rows([path])


def test_pages_are_those_that_rows_give() -> None:
    """Otherwise run `python -m benchmarks results`."""
    assert PAGE.read_text(encoding="utf-8") == page()
    readme = README.read_text(encoding="utf-8")
    assert readme == with_tables(readme)
    listed = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in RESULTS.glob("*.jsonl") if f"`results/{p.name}`" not in listed] == []


@pytest.mark.parametrize("file", ["rag.jsonl", "airline.jsonl"])
def test_replays_of_100_steps_do_not_drift(file: str) -> None:
    """Of parameters shared less dense, in the rows of each step."""
    rows = read_rows([RESULTS / "replay-h200.jsonl"])
    steps = [r["step"] for r in rows if r["metric"] == "step" and r["case"].startswith(file)]
    assert [step["step"] for step in steps] == list(range(1, 101))
    found = trend([step["difference"]["mean"] for step in steps])
    assert abs(found.errors) <= LIMIT, found


def test_the_picture_of_the_readme_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, output = ROOT / "scripts" / "plot_schedule.py", tmp_path / "schedule.svg"
    monkeypatch.setattr("sys.argv", [str(script), "--output", str(output)])
    runpy.run_path(str(script), run_name="__main__")
    kept = (ROOT / "docs" / "figures" / "schedule.svg").read_text(encoding="utf-8")
    drawn = output.read_text(encoding="utf-8")
    assert [drawn.count(tag) for tag in ("<path", "<text")] == [
        kept.count(tag) for tag in ("<path", "<text")
    ]
