"""Plots are drawn from rows: a bar is what the row says."""

import json
from pathlib import Path

import pytest

from benchmarks.attention.plot import rates
from benchmarks.plots import draw_all, read_rows
from forkpoint.errors import ConfigError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = BENCHMARKS / "results" / "attention-h200.jsonl"


@pytest.mark.parametrize("suite", ["dualkv", "prompt-caching"])
def test_bars_are_the_rates_of_the_rows(suite: str) -> None:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    found = rates(rows, suite)
    last = {row["case"]: row["command"] for row in rows}
    shown = 0
    for row in rows:
        name, case = row["case"].split("/", 1)
        way, _, metric = row["metric"].rpartition("/")
        if name == suite and metric.endswith("_rate") and row["command"] == last[row["case"]]:
            value = found[metric.removesuffix("_rate")][case][way]
            assert value == pytest.approx(row["value"], rel=1e-6), row
            shown += 1
    assert shown > 4


def test_ways_without_a_rate_of_their_own_compare_by_time() -> None:
    values = {"fa4/forward": 2.0, "fa4/forward_rate": 600.0, "dense_fa4/forward": 6.0}
    rows = [
        {"case": "s/c", "metric": metric, "value": value, "command": "now"}
        for metric, value in values.items()
    ]
    rows.insert(0, {"case": "s/c", "metric": "flex/forward", "value": 1.0, "command": "before"})
    assert rates(rows, "s")["forward"] == {"c": {"fa4": 600.0, "dense_fa4": 200.0}}


@pytest.mark.slow
def test_figures_of_attention_are_drawn_again(tmp_path: Path) -> None:
    rows = read_rows([ROWS])
    drawn = draw_all(rows, tmp_path)
    suites = ("dualkv", "prompt-caching", "ragged", "small")
    assert [path.name for path in drawn] == [f"attention-{suite}.svg" for suite in suites]
    text = drawn[0].read_text(encoding="utf-8")
    best = max(
        row["value"]
        for row in rows
        if row["case"].startswith("dualkv/") and row["metric"] == "fa4/forward_rate"
    )
    shown = text.replace(" ", "")
    assert "forward: TFLOP/s on visible pairs" in text and f">{best:.0f}<" in shown
    again = draw_all(rows, tmp_path / "again")
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in drawn]


def test_rows_of_attention_without_their_command_are_refused(tmp_path: Path) -> None:
    row = {"bench": "attention", "case": "dualkv/a", "metric": "fa4/forward", "value": 1}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match="line 1 is not a row of a benchmark: command is None"):
        read_rows([path])
