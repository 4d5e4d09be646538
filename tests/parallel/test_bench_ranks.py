"""The benchmark of several ranks on CPUs, with a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scenarios_of_ranks import group

from benchmarks.commands import main
from benchmarks.ranks.team import dense_ms
from forkpoint import RolloutBatch


def test_one_process_is_told_how_to_start_several(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", "--tiny"]) == 2
    assert "torchrun --nproc-per-node 2 -m benchmarks ranks" in capsys.readouterr().err


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


def on_ranks(count: int, *options: str, bench: str = "ranks") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(count), "-m", "benchmarks", bench, "--tiny", "--json"]
    command += ["--repeats", "1", *options]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.slow
def test_all_parts_run_on_two_ranks(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    done = on_ranks(2, "--blocks", "eager", "--layers", "1", "--output", str(output))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1 and json.loads(lines[0])["benchmark"] == "ranks"
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    found = {(row["case"].split(", ", 3)[-1], row["metric"]): row for row in rows}
    assert len(found) == len(rows) == json.loads(lines[0])["rows"]
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
    output = tmp_path / "rows.jsonl"
    options = ("--blocks", "eager", "--layers", "1", "--shapes", "qwen3-8b", "--prompts", "8192")
    done = on_ranks(2, *options, "--output", str(output), bench="context")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    found = {(row["case"].split("eager, ")[-1], row["metric"]): row for row in rows}
    assert len(found) == len(rows)
    steps = []
    for way in ("by heads", "leaves dealt out"):
        check = found[f"2 layers, float32, {way}", "error of gradients beside one rank's"]
        assert 0 < check["value"] <= check["bar"]
        steps.append(found[f"P8192, {way}", "shared step"]["value"])
        ratio = found[f"P8192, {way}", "shared step over one rank's"]["value"]
        assert ratio == pytest.approx(steps[-1] / found["P8192, one rank", "shared step"]["value"])
    speed_up = found["P8192", "speed-up"]
    dense = found["P8192", "dense step"]["value"]
    assert speed_up["value"] == pytest.approx(dense / min(steps))
    assert 1 < speed_up["bound"] < 5
    gathered, heads = "P8192, gathered for every microbatch", "P8192, by heads"
    assert found[heads, "sent by each rank"]["value"] > 0
    assert found[gathered, "sent by each rank"]["value"] > 0
    difference = found[gathered, "estimated step"]["value"] - steps[0]
    times = [found[case, "collectives alone"]["value"] for case in (gathered, heads)]
    assert difference == pytest.approx(times[0] - times[1])


@pytest.mark.parametrize("name", ["context", "pipeline"])
def test_several_ranks_are_asked_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--tiny"]) == 2
    assert f"torchrun --nproc-per-node 2 -m benchmarks {name}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_pipeline_of_two_ranks(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    options = ("--layers", "4", "--group-sizes", "6", "--output", str(output))
    done = on_ranks(2, *options, bench="pipeline")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    found = {row["metric"]: row["value"] for row in rows}
    assert 0 < found["predicted bubble"] < 0.5 and len(found) == len(rows) == 8
    assert found["predicted bubble"] <= found["predicted bubble of three barriers"]
    ratio = found["one rank's step"] / found["step"]
    assert found["measured bubble"] == pytest.approx(1 - ratio / 2)
    assert found["measured speed-up"] == pytest.approx(ratio)
