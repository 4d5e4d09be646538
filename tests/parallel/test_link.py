"""The measurement of the link between ranks, and what ranks choose by it."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import launched, run_ranks
from scenarios_of_ranks import group, replicated, sharded
from test_prompt_exchange import dealt, model_of, of

import forkpoint
from forkpoint import Config, RolloutBatch
from forkpoint.device import device_name
from forkpoint.losses import GRPO
from forkpoint.plan.pricing.calibration import FOLDER_VARIABLE, Link, calibration_path
from forkpoint.step.calibrate import automatic
from forkpoint.step.calibrate.link import MIB, _line, measure_link
from made_calibrations import made_up

CPU = torch.device("cpu")
SIZES = (1 << 16, 1 << 21)
GROUPS = [group(n, 4, 700, 9) for n in range(2)]


def measured() -> Link:
    return measure_link(CPU, sizes=SIZES, repeats=2)


def test_ranks_measure_one_link() -> None:
    one, two = run_ranks(2, measured)
    assert one == two
    assert (one.ranks, one.backend) == (2, "gloo")
    # Slower than memory and faster than a modem, whatever else the machine does.
    for rate in (one.gather_bytes_per_ms, one.send_bytes_per_ms):
        assert 1e2 < rate < 1e9
    assert 0 <= max(one.gather_latency_ms, one.send_latency_ms) < 1e4


@pytest.mark.parametrize("small", [32.1, 63.9999, 64.0, 500.0])
def test_a_disturbed_transfer_gives_no_absurd_rate(small: float) -> None:
    """The smaller transfer takes nearly as long as the larger one, as long, and longer."""
    rate, latency = _line((MIB, 64 * MIB), (small, 64.0))
    assert rate == 63 * MIB / 32.0
    assert latency == 32.0 - 32.0 / 63


def test_undisturbed_transfers_give_the_line_through_both() -> None:
    assert _line((MIB, 64 * MIB), (3.0, 66.0)) == (MIB, 2.0)
    assert _line((MIB, 64 * MIB), (0.5, 63.5)) == (MIB, 0.0)


def chosen(folder: Path, wrap: Any, times: float) -> tuple[str, str]:
    """Choices of ranks by the link that they have measured, and a link so many times as fast."""
    link = measured()
    link = replace(
        link,
        gather_bytes_per_ms=link.gather_bytes_per_ms * times,
        gather_latency_ms=link.gather_latency_ms / times,
        send_bytes_per_ms=link.send_bytes_per_ms * times,
        send_latency_ms=link.send_latency_ms / times,
    )
    model = wrap(model_of(of()))
    shape = forkpoint.wrap(model).host.shape
    path = folder / f"{dist.get_rank()}.json"
    made_up(shape=shape, device=device_name(CPU), compiled=False, link=link).save(path)
    policy = forkpoint.wrap(model, Config(calibration=str(path), self_check=False))
    rollouts = dealt(GROUPS, 2)[dist.get_rank()]
    plan = policy.forward_backward(RolloutBatch(rollouts), GRPO()).plan
    assert "link of 2 ranks measured by gloo" in plan.explain()
    return plan.split, plan.gather


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "times", "choice"),
    [
        (replicated, 1e9, "exchange"),
        (replicated, 1e-9, "replicate"),
        (sharded, 1e9, "microbatch"),
        (sharded, 1e-9, "step"),
    ],
)
def test_prompts_and_weights_are_sent_where_the_link_is_fast(
    wrap: Any, times: float, choice: str, tmp_path: Path
) -> None:
    for found in run_ranks(2, chosen, tmp_path, wrap, times):
        assert choice in found


def measures(folder: Path) -> tuple[float, list[str]]:
    """The calibration of a rank, where two ranks find others and the third measures."""
    automatic.MEASURED.add("cpu")
    rank = dist.get_rank()
    os.environ[FOLDER_VARIABLE] = str(folder / str(rank))
    model = replicated(model_of(of()))
    shape = forkpoint.wrap(model).host.shape
    device = device_name(CPU)
    if rank < 2:
        path = calibration_path(device, shape, compiled=False)
        made_up(shape=shape, device=device, compiled=False, seconds=1.0 + rank).save(path)
    policy = forkpoint.wrap(model, Config(self_check=False))
    for _ in range(2):
        policy.forward_backward(RolloutBatch(dealt(GROUPS, 3)[rank]), GRPO())
    if rank == 2:
        assert list((folder / "2").iterdir())
    found = policy.model_state.calibration(policy.host, policy.config)
    assert found is not None
    return found.seconds, sorted(policy.model_state.agreed)


@pytest.mark.slow
def test_ranks_take_one_measurement(tmp_path: Path) -> None:
    assert run_ranks(3, measures, tmp_path) == [(1.0, ["auto"])] * 3


@pytest.mark.slow
def test_the_command_measures_it(tmp_path: Path) -> None:
    from forkpoint.testing import tiny_model

    tiny_model("qwen3").config.save_pretrained(tmp_path)
    files = ("--model", str(tmp_path / "config.json"), "--output", str(tmp_path / "c.json"))
    done = launched("forkpoint", "calibrate", "--device", "cpu", *files, "--max-seconds", "1")
    assert done["command"] == "calibrate"
    assert json.loads((tmp_path / "c.json").read_text())["link"]["ranks"] == 2
