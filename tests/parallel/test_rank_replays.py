"""Replays on several ranks: ended at any moment, resumed bitwise, and on other numbers of ranks."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import RankFailed, run_ranks
from rank_replays import assert_same_end, copied, leaves_at, replayed, rollouts, rows, whole_state

from forkpoint import save_rollouts
from forkpoint.apps.cli import main
from forkpoint.apps.replay.checkpoint import Checkpoints
from forkpoint.apps.replay.folder import CHECKPOINT, ReplayFolder
from forkpoint.errors import ConfigError, ForkpointError, RankError, UnsupportedError
from forkpoint.testing import tiny_model


def summary(folder: Path, **options: Any) -> dict[str, Any]:
    values = replayed(folder, **options).to_dict()
    return {name: values[name] for name in ("resumed_at", "logical_tokens", "shared_losses")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A replay of two ranks that ran to its end, and beside it one that ended after two steps."""
    place = tmp_path_factory.mktemp("replays")
    run_ranks(2, summary, place / "whole")
    with pytest.raises(RankFailed):
        run_ranks(2, ended_after, place / "begun", 2)
    return place


def ended_after(folder: Path, step: int) -> None:
    replayed(folder, on_step=leaves_at(step))


def furthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[n].double() - wanted[n].double()).abs().max()) for n in found)


@pytest.mark.slow
def test_two_ranks_resume_bitwise(undisturbed: Path, tmp_path: Path) -> None:
    folder = copied(undisturbed / "begun", tmp_path / "out")
    first, second = run_ranks(2, summary, folder)
    assert first["resumed_at"] == second["resumed_at"] == 2
    assert first["shared_losses"] == second["shared_losses"]
    assert_same_end(folder, undisturbed / "whole")


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_another_number_of_ranks_resumes_within_rounding(
    ranks: int, undisturbed: Path, tmp_path: Path
) -> None:
    folder = copied(undisturbed / "begun", tmp_path / "out")
    for rank in run_ranks(ranks, summary, folder):
        assert rank["resumed_at"] == 2
    assert furthest(whole_state(folder), whole_state(undisturbed / "whole")) < 1e-10
    for one, other in zip(rows(folder), rows(undisturbed / "whole"), strict=True):
        assert one["shared"]["loss"] == pytest.approx(other["shared"]["loss"], abs=1e-10)


# Wrong folders
# ------------------------------------------------------------


def refused(folder: Path, **options: Any) -> str:
    try:
        replayed(folder, **options)
    except ForkpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def contents(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.read_bytes() for path in files}


def test_wrong_folders_are_refused_on_all_ranks(undisturbed: Path, tmp_path: Path) -> None:
    folder = copied(undisturbed / "begun", tmp_path / "out")
    (path,) = folder.glob(f"{CHECKPOINT}*/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    before = contents(folder)
    for text in run_ranks(2, refused, folder):
        assert "is damaged: it has SHA-256" in text, text
    assert contents(folder) == before


@pytest.mark.slow
def test_one_process_does_not_resume_ranks(undisturbed: Path, tmp_path: Path) -> None:
    folder = copied(undisturbed / "begun", tmp_path / "out")
    assert "sharded was True and is now 'nothing'" in refused(folder, model=tiny_model("qwen3"))


def other_options() -> tuple[str, str]:
    rank = dist.get_rank()
    try:
        replayed(Path("out"), steps=4 + rank)
    except ConfigError as error:
        first = str(error)
    try:
        replayed(Path("out"), baseline=True)
    except UnsupportedError as error:
        return first, str(error)
    return first, ""


@pytest.mark.slow
def test_ranks_with_other_options_are_refused() -> None:
    for options, baseline in run_ranks(2, other_options):
        assert "replay different things: steps is" in options and "on rank 1" in options
        assert "not copied" in baseline


# Kills while a checkpoint is being written
# ------------------------------------------------------------


def killed_while_saving(folder: Path, at: str, rank: int) -> None:
    """One rank is killed at a call within the second save."""
    kind = Checkpoints if at.startswith("_") else ReplayFolder
    original, calls = getattr(kind, at), [0]

    def dies(*args: Any) -> Any:
        calls[0] += 1
        if dist.get_rank() == rank and calls[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(kind, at, dies)
    try:
        replayed(folder)
    except RankError as error:
        assert "has died or ended" in str(error)
        raise


@pytest.mark.slow
@pytest.mark.parametrize(("at", "rank"), [("_write", 1), ("finish_checkpoint", 0)])
def test_a_rank_that_is_killed_while_saving(
    at: str, rank: int, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    try:
        run_ranks(2, killed_while_saving, folder, at, rank, limit_s=40)
    except RankFailed as failed:
        assert "killed after" not in str(failed)
        assert f"rank {rank}: ended with exit status -9" in str(failed)
        assert f"rank {1 - rank}: Traceback" in str(failed) and "RankError" in str(failed)
    run_ranks(2, summary, folder)
    assert_same_end(folder, undisturbed / "whole")


# The command
# ------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model("qwen3").config.save_pretrained("model")
    save_rollouts("rollouts.jsonl", rollouts())
    arguments = [
        *("replay", "rollouts.jsonl", "--model", "model/config.json", "--json"),
        *("--dtype", "float32", "--device", "cpu", "--steps", "3", "--groups-per-step", "2"),
    ]
    environment = {k: v for k, v in os.environ.items() if k != "FORKPOINT_DEBUG"}
    ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ranks += ["--standalone", "-m", "forkpoint", *arguments, "--output", "ranks"]
    done = subprocess.run(
        ranks, capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.strip().splitlines()
    assert main([*arguments, "--output", "alone"]) == 0
    found, wanted = json.loads(line), json.loads(capsys.readouterr().out)
    assert found["logical_tokens"] == wanted["logical_tokens"]
    assert found["shared_losses"] == pytest.approx(wanted["shared_losses"], abs=1e-5)
    assert main(["report", "ranks", "--output", "page.html"]) == 0
