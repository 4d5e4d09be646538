"""The benchmark of several ranks on CPUs, with a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
from processes import launched
from scenarios_of_ranks import group

from benchmarks.commands import main
from benchmarks.ranks.team import dense_ms
from forkpoint import RolloutBatch


def test_dense_steps_are_extrapolated_without_what_comes_once() -> None:
    batch = RolloutBatch(group(0, 10, 6, 5))
    whole = 7.0 + 3.0 * int(batch.lengths.sum())
    assert dense_ms(lambda some: 7.0 + 3.0 * int(some.lengths.sum()), batch, (2, 4)) == whole


def test_one_rank_has_no_link(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    assert main(["ranks", "--tiny", "--parts", "data", "--calibrate"]) == 2
    assert "the link between ranks, and there is one rank" in capsys.readouterr().err
    assert main(["ranks", "--tiny"]) == 2
    assert "--parts data" in capsys.readouterr().err


def rows_of(output: Path, bench: str, *options: str) -> list[dict[str, Any]]:
    """Rows of the benchmark on two ranks."""
    bench_options = ("--tiny", "--repeats", "1", "--output", str(output))
    done = launched("benchmarks", bench, *bench_options, *options)
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert (done["benchmark"], done["rows"]) == (bench, len(rows))
    return rows


@pytest.mark.slow
def test_all_parts_run_on_two_ranks(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "rows.jsonl", "ranks", "--blocks", "eager", "--layers", "1")
    found = {(row["case"].split(", ", 3)[-1], row["metric"]): row for row in rows}
    assert len(found) == len(rows)
    for row in rows:
        assert row["value"] == row["value"] and row["commit"] and row["command"]
    checks = [row for row in rows if row["metric"] == "plans that are not exact"]
    assert len(checks) == 2 and all(row["value"] == 0 == row["bar"] for row in checks)
    for case in ("fully_shard, gather microbatch", "fully_shard, gather step"):
        ratio = found[case, "dense step"]["value"] / found[case, "shared step"]["value"]
        assert found[case, "speed-up"]["value"] <= ratio * (1 + 1e-9)
        assert found[case, "speed-up"]["bound"] > 1
    assert ("one group of 32, exchange", "predicted step over replicating") in found


@pytest.mark.slow
def test_context_parallelism_on_two_ranks(tmp_path: Path) -> None:
    options = ("--blocks", "eager", "--layers", "1", "--shapes", "qwen3-8b", "--prompts", "8192")
    rows = rows_of(tmp_path / "rows.jsonl", "context", *options)
    found = {(row["case"].split("eager, ")[-1], row["metric"]): row for row in rows}
    assert len(found) == len(rows)
    steps = []
    sent = []
    for way in ("by heads", "leaves dealt out", "gathered by layer"):
        check = found[f"2 layers, float32, {way}", "error of gradients beside one rank's"]
        assert 0 < check["value"] <= check["bar"]
        steps.append(found[f"P8192, {way}", "shared step"]["value"])
        sent.append(found[f"P8192, {way}", "sent by each rank"]["value"])
        ratio = found[f"P8192, {way}", "shared step over one rank's"]["value"]
        assert ratio == pytest.approx(steps[-1] / found["P8192, one rank", "shared step"]["value"])
    speed_up = found["P8192", "speed-up"]
    dense = found["P8192", "dense step"]["value"]
    assert speed_up["value"] == pytest.approx(dense / min(steps[:2]))
    assert 1 < speed_up["bound"] < 5
    assert 0 < sent[1] < sent[2]


@pytest.mark.parametrize("name", ["ranks", "context", "pipeline"])
def test_several_ranks_are_asked_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--tiny"]) == 2
    assert f"torchrun --nproc-per-node 2 -m benchmarks {name}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_pipeline_of_two_ranks(tmp_path: Path) -> None:
    options = ("--layers", "4", "--group-sizes", "6")
    rows = rows_of(tmp_path / "rows.jsonl", "pipeline", *options)
    found = {row["metric"]: row["value"] for row in rows}
    assert 0 < found["predicted bubble"] < 0.5 and len(found) == len(rows) == 8
    assert found["predicted bubble"] <= found["predicted bubble of three barriers"]
    ratio = found["one rank's step"] / found["step"]
    assert found["measured bubble"] == pytest.approx(1 - ratio / 2)
    assert found["measured speed-up"] == pytest.approx(ratio)
