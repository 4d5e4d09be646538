"""The commands of a new user, by scripts/first_hour.py: every one ends with exit code 0."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "first_hour.py"
COMMANDS = ["forkpoint", "doctor", "demo", "plan", "plan", "verify", "replay", "report", "-c"]


def ran(folder: Path, *options: str) -> None:
    table = folder / "table.json"
    # With the optional kernels that are installed, or without: as the environment has them.
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json", table, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    rows = json.loads(table.read_text(encoding="utf-8"))
    assert [row["exit_code"] for row in rows] == [0] * len(COMMANDS), done.stdout
    for row, word in zip(rows, COMMANDS, strict=True):
        assert word in row["command"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_on_a_cpu(tmp_path: Path) -> None:
    ran(tmp_path, "--device", "cpu", "--steps", "2", "--loop-steps", "2")


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_on_a_gpu(tmp_path: Path, dtype: str) -> None:
    ran(tmp_path, "--device", "cuda", "--dtype", dtype, "--steps", "2", "--loop-steps", "2")
