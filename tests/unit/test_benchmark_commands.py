"""The command line of the benchmarks: names, help, and what is refused before anything runs."""

import json
import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from benchmarks import commands
from benchmarks.commands import COMMANDS, command, main
from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_measures_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"usage: python -m benchmarks {name}") and not captured.err


@pytest.mark.parametrize("name", COMMANDS)
def test_names_and_options_are_explained(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    kind = command(name)
    assert getattr(kind, "NAME", name) == name
    text = "".join(base.__doc__ or "" for base in kind.__mro__ if is_dataclass(base))
    for field in fields(kind):
        assert re.search(rf"^ +{field.name}: \w", text, re.MULTILINE), field.name


def test_every_benchmark_has_a_name() -> None:
    """A class of a benchmark that no name leads to could not be run."""
    kinds = {command(name) for name in COMMANDS}

    def below(kind: type) -> Iterator[type]:
        for sub in kind.__subclasses__():
            yield sub
            yield from below(sub)

    named = {sub for sub in below(Benchmark) if sub.__module__.startswith("benchmarks.")}
    assert {sub for sub in named if "NAME" in vars(sub)} <= kinds


def test_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks", run_name="__main__")
    assert not ended.value.code
    shown = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"^ *{name} +\w", shown, re.MULTILINE), name


GPU_ONLY = ["attention", "hybrid", "memory"]


@pytest.mark.parametrize("name", GPU_ONLY)
def test_without_a_gpu(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert main([name]) == 2
    assert "torch sees no CUDA device here; run it on a machine with" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["attentoin"], "there is no benchmark 'attentoin'; there are attention, "),
        (["attention", "--suite", "smoke"], "smoke"),
        (
            ["attention", "--kernels", "flashy"],
            "kernels has 'flashy'; allowed are fa4, cudnn, fa2, cpu_flash, reference.",
        ),
        (["attention", "--dtypes"], "dtypes names none, so there is nothing to measure"),
        (["attention", "--only", "R640"], "no case of dualkv, prompt-caching, ragged, small has"),
        (
            ["attention", "--output", "none/attention.jsonl"],
            "output is none/attention.jsonl, which is a folder or lies in none",
        ),
        (["hybrid", "--suite", "ragged"], "ragged"),
        (["hybrid", "--layers", "0"], "layers is 0; it takes a whole number of at least 1"),
        (["hybrid", "--suite", "smoke", "--only", "R640"], "no case has R640 in its name; there"),
        (["step-grid", "--tiny", "--layers", "0"], "layers is 0"),
        (["trl", "--rows", "5"], "rows is 5, and a step has 4 * 8 completions; give a divisor"),
        (["trl", "--tokens", "8"], "tokens is 8; it takes at least 64"),
        (["trl", "--completions", "1"], "completions is 1; GRPO compares at least 2"),
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
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out


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


@pytest.mark.parametrize(("value", "code"), [("2", 0), ("2.5", 1), ("nan", 1)])
def test_a_figure_above_its_bar_fails(
    value: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "command", lambda _: Made)
    monkeypatch.setitem(COMMANDS, "made", "")
    assert main(["made", "--value", value, "--json"]) == code
    result = json.loads(capsys.readouterr().out)
    assert result["rows"] == 2 and result["failed"] == (["a: m"] if code else [])
    lines = (tmp_path / "made.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["case"] for row in rows] == ["a", "b"]
    assert all(row["commit"] and row["versions"]["torch"] and row["device"] for row in rows)


def test_the_time_that_is_up_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "command", lambda _: Made)
    monkeypatch.setitem(COMMANDS, "made", "")
    assert main(["made", "--max-seconds", "0"]) == 0
    assert "left out, the time was up: the second" in capsys.readouterr().out
    assert main(["made", "--max-seconds", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == ["the second"]


def test_the_picture_of_the_readme_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ROOT / "scripts" / "plot_schedule.py"
    output = tmp_path / "schedule.svg"
    monkeypatch.setattr("sys.argv", [str(script), "--output", str(output)])
    runpy.run_path(str(script), run_name="__main__")
    kept = (ROOT / "docs" / "figures" / "schedule.svg").read_text(encoding="utf-8")
    drawn = output.read_text(encoding="utf-8")
    assert drawn.count("<path") == kept.count("<path") and drawn.count("<text") == kept.count(
        "<text"
    )
