"""verl's PPO trainer on two CPU workers of ray, with rollouts of a stub, from end to end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here: make test-verl")

from train_with_ray import PROMPTS, STEPS

HERE = Path(__file__).parent


OWN = {f"actor/forkpoint/{n}" for n in ("computed_tokens", "given_tokens", "bound")}


def trained(
    vendor: str, folder: Path, how: str, script: str = "train_with_ray.py"
) -> list[dict[str, float]]:
    """Metrics of each step; `how` is the script's last argument."""
    # The time of the host would decide for so small a model, and plans would share nothing.
    settings = folder / "forkpoint.toml"
    settings.write_text('[config]\nsharing = "group"\n')
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "FORKPOINT_VERL_CONFIG": str(settings)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / script, vendor, folder, how],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_steps_of_the_trainer_have_the_metrics_of_stock(folder: Path) -> None:
    stock = trained("nvidia", folder, "none")
    shared = trained("forkpoint", folder, "none")
    same_metrics(stock, shared)


def same_metrics(stock: list[dict[str, float]], shared: list[dict[str, float]]) -> None:
    """verl's metrics of each step, and forkpoint's besides."""
    assert len(stock) == len(shared) == STEPS
    for expected, found in zip(stock, shared, strict=True):
        assert found.keys() - expected.keys() == OWN
        compared = [
            name
            for name in expected
            if name.startswith(("actor/", "critic/", "training/")) and "perf" not in name
        ]
        assert {"actor/pg_loss", "actor/ppo_kl", "actor/entropy", "actor/grad_norm"} <= {*compared}
        for name in compared:
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name


def test_a_reference_engine_of_its_own(folder: Path) -> None:
    """verl's own does not run on CPUs: its parameters are in pinned memory."""
    found = trained("forkpoint", folder, "engine")
    assert len(found) == STEPS
    for step in found:
        assert step["actor/forkpoint/computed_tokens"] < 0.5 * step["actor/forkpoint/given_tokens"]
        assert step["actor/grad_norm"] > 0
    assert found[0]["actor/kl_loss"] >= 0 and found[1]["actor/kl_loss"] > 0
    assert PROMPTS % 2 == 0  # whole groups on each of two ranks


def test_the_newer_trainer_with_whole_groups(folder: Path) -> None:
    """verl places rollouts one by one there; forkpoint's trainer is verl's, but for the places."""
    pytest.importorskip("transfer_queue")
    script = "train_newer_with_ray.py"
    stock = trained("nvidia", folder, "forkpoint_sync", script)
    shared = trained("forkpoint", folder, "forkpoint_sync", script)
    same_metrics(stock, shared)
    for step in shared:
        assert step["actor/forkpoint/computed_tokens"] < 0.5 * step["actor/forkpoint/given_tokens"]
