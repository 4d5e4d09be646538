"""The benchmark of TRL's trainers, on a tiny model."""

import json
from pathlib import Path

import pytest

from benchmarks.commands import main

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = ["--prompts", "2", "--completions", "4", "--rows", "4", "--repeats", "1", "--tokens", "128"]


def test_tiny_rows_of_every_side(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    options = ["--tiny", *SMALL, "--iterations", "2", "--json", "--output", str(output)]
    assert main(["trl", *options]) == 0
    rows = {r["metric"]: r for r in map(json.loads, output.read_text().splitlines())}
    assert rows["apart from TRL's, float32"]["value"] < 2e-6
    for side in ("forkpoint", "forkpoint, sharing none", "TRL, sdpa"):
        parts = [rows[f"{side}: {part}"]["value"] for part in ("update", "scores", "optimizer")]
        assert all(part > 0 for part in parts)
        assert sum(parts) < rows[f"{side}: step without generation"]["value"]
    # Two prompts of 112 tokens with four completions of 2 each, whose last tokens are not run. A
    # prompt's last token runs for each of its completions.
    assert "group + within, 238 of 912 tokens" in rows["forkpoint: update"]["note"]
    assert "none + within, 904 of 912 tokens" in rows["forkpoint, sharing none: update"]["note"]


def test_prompts_of_a_file(tmp_path: Path) -> None:
    output, file = tmp_path / "rows.jsonl", tmp_path / "rollouts.jsonl"
    rollouts = [
        {"group_id": f"g{g}", "token_ids": [7] * 20 + [g + 2] * n + [5], "loss_mask": [0] * 20}
        for g in range(2)
        for n in (3, 4)
    ]
    for one in rollouts:
        one["loss_mask"] = [0] * 20 + [1] * (len(one["token_ids"]) - 20)
    file.write_text("".join(json.dumps({**one, "advantage": 0.5}) + "\n" for one in rollouts))
    options = ["--file", str(file), "--no-check", "--sides", "shared", "--output", str(output)]
    assert main(["trl", "--tiny", *SMALL, "--json", *options]) == 0
    cases = {json.loads(line)["case"] for line in output.read_text().splitlines()}
    assert cases == {"tiny, 2 prompts of 20 to 20, 4 of 2 each, checkpointed, rollouts.jsonl"}


def test_trl_beside_its_peers(tmp_path: Path) -> None:
    """PrefixGrouper is a package of its own, which `make test-trl` installs as well."""
    output, size = (
        tmp_path / "rows.jsonl",
        ["--length", "2048", "--tokens", "128", "--repeats", "1"],
    )
    sides = ["--sides", "loop", "prefix-grouper", "forkpoint", "trl"]
    assert main(["peers", "--tiny", *size, *sides, "--json", "--output", str(output)]) == 0
    rows = {r["metric"]: r for r in map(json.loads, output.read_text().splitlines())}
    for name in ("PrefixGrouper", "forkpoint", "TRL"):
        assert rows[f"{name}: apart from the plain loop in float64"]["value"] < 1e-6
        assert rows[f"{name}: update"]["value"] > 0


def test_trl_with_images(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    size = ["--visual", "2000", "--text", "640", "--repeats", "1", "--blocks", "eager"]
    assert main(["images", "--tiny", *size, "--rows", "2", "--json", "--output", str(output)]) == 0
    found = [json.loads(line) for line in output.read_text().splitlines()]
    rows = {(r["case"].split(",")[1].strip(), r["metric"]): r for r in found}
    assert rows["2 layers", "error of TRL, float32"]["value"] < 2e-6
    for case in ("encoder trained", "encoder frozen"):
        step = {name: rows[case, f"{name} step"] for name in ("TRL", "forkpoint")}
        assert step["TRL"]["note"] == "per_device_train_batch_size=2, sdpa"
        faster = rows[case, "faster than TRL"]
        ratio = step["TRL"]["value"] / step["forkpoint"]["value"]
        assert faster["value"] == pytest.approx(ratio) and faster["bound"] > 1
