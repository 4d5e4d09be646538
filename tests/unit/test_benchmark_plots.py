"""Plots are drawn from rows: a bar is what the row says."""

import json
import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = BENCHMARKS / "results" / "attention-h200.jsonl"


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(BENCHMARKS / "plot_attention.py"))


@pytest.mark.parametrize("suite", ["dualkv", "prompt-caching"])
def test_bars_are_the_rates_of_the_rows(script: dict, suite: str) -> None:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    found = script["rates"](rows, suite)
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


def test_ways_without_a_rate_of_their_own_compare_by_time(script: dict) -> None:
    values = {"fa4/forward": 2.0, "fa4/forward_rate": 600.0, "dense_fa4/forward": 6.0}
    rows = [
        {"case": "s/c", "metric": metric, "value": value, "command": "now"}
        for metric, value in values.items()
    ]
    rows.insert(0, {"case": "s/c", "metric": "flex/forward", "value": 1.0, "command": "before"})
    assert script["rates"](rows, "s")["forward"] == {"c": {"fa4": 600.0, "dense_fa4": 200.0}}


def test_a_plot_is_written(script: dict, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    script["draw"](script["rates"](rows, "dualkv"), "title", tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    best = max(
        row["value"]
        for row in rows
        if row["case"].startswith("dualkv/") and row["metric"] == "fa4/forward_rate"
    )
    shown = text.replace(" ", "")
    assert "forward: TFLOP/s on visible pairs" in text and f">{best:.0f}<" in shown
