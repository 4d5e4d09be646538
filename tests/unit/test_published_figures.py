"""Published figures are those of the rows."""

from pathlib import Path

import pytest

from benchmarks.plots import read_rows
from benchmarks.results_page import PAGE, README, RESULTS, page, with_tables
from forkpoint.apps.replay.trend import LIMIT, trend


def test_pages_are_those_that_rows_give() -> None:
    """Otherwise run `python -m benchmarks results`."""
    assert PAGE.read_text(encoding="utf-8") == page()
    readme = README.read_text(encoding="utf-8")
    assert readme == with_tables(readme)


def test_every_file_of_rows_is_listed() -> None:
    listed = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in RESULTS.glob("*.jsonl") if f"`results/{p.name}`" not in listed] == []


@pytest.mark.parametrize("file", ["rag.jsonl", "airline.jsonl"])
def test_replays_of_100_steps_do_not_drift(file: str) -> None:
    """Of parameters shared less dense, in the rows of each step."""
    rows = read_rows([RESULTS / "replay-h200.jsonl"])
    steps = [r["step"] for r in rows if r["metric"] == "step" and r["case"].startswith(file)]
    assert [step["step"] for step in steps] == list(range(1, 101))
    found = trend([step["difference"]["mean"] for step in steps])
    assert abs(found.errors) <= LIMIT, found
