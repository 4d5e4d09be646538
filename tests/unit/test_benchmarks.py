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
from benchmarks.results_page import PAGE, README, RESULTS, latest, page, with_table
from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline
from forkpoint.apps.cli.app import App

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
        (["groups"], "torch sees no CUDA device here; run it on a machine with"),
        (["attention", "--kernels", "flashy"], "kernels has 'flashy'; allowed are fa4, "),
        (["attention", "--only", "R640"], "no case of dualkv, prompt-caching, ragged, small has"),
        (["attention", "--output", "none/rows.jsonl"], "which is a folder or lies in none"),
        (["groups", "--tiny", "--groups", "R640"], "groups has 'R640'; give P8192-R2048-N32"),
        (["groups", "--tiny", "--routers", "batch"], "are those of a mixture, and llama3-8b has"),
        (["groups", "--tiny", "--layers", "0"], "layers is 0"),
        (["trl", "--rows", "5"], "rows is 5, and a step has 4 * 8 completions; give a divisor"),
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
    assert [found["value"] for found in latest(rows).values()] == [3.0, 2.0]
    failed = {**row, "metric": "out of memory", "value": 1.0}
    assert list(latest([rows[0], rows[1], failed]).values()) == [rows[1], failed]
    assert list(latest([failed, rows[0]]).values()) == [rows[0]]


def test_pages_are_those_that_rows_give() -> None:
    """Otherwise run `python -m benchmarks results`."""
    assert PAGE.read_text(encoding="utf-8") == page()
    readme = README.read_text(encoding="utf-8")
    assert readme == with_table(readme)
    listed = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in RESULTS.glob("*.jsonl") if f"`results/{p.name}`" not in listed] == []


def test_the_figure_of_the_schedule_is_drawn(
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
