"""Benchmarks with models of torchtitan."""

import json
from pathlib import Path

import pytest

from benchmarks.commands import main
from benchmarks.runner import Deadline
from benchmarks.shapes import make_model, make_titan_model
from benchmarks.steps.groups import Groups


def test_sizes_are_those_of_transformers() -> None:
    theirs = make_titan_model("llama3-8b", "meta")
    ours = make_model("llama3-8b", "meta")
    assert sorted(tuple(p.shape) for p in theirs.parameters()) == sorted(
        tuple(p.shape) for p in ours.parameters()
    )


def test_a_group_is_timed() -> None:
    made = Groups(
        tiny=True, layers=1, blocks="eager", groups=("P6144-R1024-N4",), library="torchtitan"
    )
    rows = {row.metric: row for row in made.measure(Deadline(None))}
    assert "of torchtitan" in rows["speed-up"].case
    assert rows["shared nonfinite"].value == 0


@pytest.mark.slow
def test_combined_parallelism(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    # Without the file, batches are chains of turns.
    options = ("--families", "qwen3_moe", "--stages", "2", "--seeds", "1", "--data", str(tmp_path))
    found = main(["compositions", "--library", "torchtitan", *options, "--output", str(output)])
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert found == 0 and len(rows) == 6
    assert all(0 < row["value"] < row["bar"] <= 1e-4 for row in rows)
