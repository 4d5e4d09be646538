"""Replaying a trace: each recorded batch is a step, with the loss and what it was given."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Shell, made_up_rollouts, write_config

import forkpoint
from forkpoint import ConfigError, RolloutBatch, wrap
from forkpoint.apps.replay.batches import TraceBatches
from forkpoint.apps.replay.folder import ROWS
from forkpoint.apps.replay.loop import replay
from forkpoint.losses import GRPO, Denominators, LogLikelihood
from forkpoint.rollouts.traces import Trace, open_trace
from forkpoint.testing import tiny_model

GIVEN: list[dict[str, Any]] = [
    {},
    {"denominators": Denominators(tokens=100.0, rollouts=12.0, groups=4.0), "scale": 0.5},
    {"scale": 2},
]


def batches() -> list[RolloutBatch]:
    whole = RolloutBatch(made_up_rollouts())
    return [whole.select(members.tolist()) for members in whole.groups()]


def record(path: Path, given: list[dict[str, Any]] | None = None) -> Trace:
    with forkpoint.record(path) as trace:
        for batch, inputs in zip(batches(), given or GIVEN, strict=True):
            trace.add(batch, inputs)
    return open_trace(path)


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def run(trace: Trace, *, steps: int = 5, **options: Any) -> Any:
    model = tiny_model("qwen3")
    report = replay(
        model, TraceBatches(trace, steps), GRPO(), optimizer=sgd, steps=steps, **options
    )
    return model, report


def test_a_step_is_a_recorded_batch_with_what_its_loss_was_given(tmp_path: Path) -> None:
    """Against a loop written out here."""
    expected = tiny_model("qwen3")
    policy = wrap(expected)
    optimizer = sgd(list(expected.parameters()))
    losses = []
    for step in range(5):
        losses.append(policy.forward_backward(batches()[step % 3], GRPO(), **GIVEN[step % 3]).loss)
        optimizer.step()
        optimizer.zero_grad()
    model, report = run(record(tmp_path / "trace"))
    assert [step.shared.loss for step in report.steps] == pytest.approx(losses, abs=1e-12)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.slow
def test_the_command_asks_for_the_loss_of_a_trace(shell: Shell, tmp_path: Path) -> None:
    record(tmp_path / "trace")
    config = write_config(tmp_path / "config.json")
    arguments = ("replay", tmp_path / "trace", "--model", config, "--steps", 3, "--json")
    refused = shell(*arguments)
    assert refused.code == 2 and "no loss is recorded. Set --loss" in refused.err
    done = shell(*arguments, "--loss", "likelihood", "--output", tmp_path / "run")
    assert done.code == 0, done.err
    assert done.result["rollouts"] == 9 and done.result["format"] == "trace"
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["fixed"]["loss"] == repr(LogLikelihood())


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"kl_weights": np.ones(3)}, "loss inputs kl_weights"),
        ({"scale": "half"}, "batch 2: scale is 'half'; it takes a number"),
        ({"scale": 1e300}, "batch 2: scale is 1e[+]300; it takes a number from"),
        ({"denominators": {"tokens": 1}}, "batch 2: denominators.rollouts is missing"),
    ],
    ids=["unknown", "text", "large", "missing"],
)
def test_what_cannot_be_given_is_refused_before_the_first_step(
    inputs: dict[str, Any], said: str, tmp_path: Path
) -> None:
    trace = record(tmp_path / "trace", [{}, {}, inputs])
    model = tiny_model("qwen3")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=said):
        replay(model, TraceBatches(trace, 3), GRPO(), optimizer=sgd, steps=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_only_what_is_replayed_has_to_be_the_same(tmp_path: Path) -> None:
    """A trace that has grown is the same trace as far as the replay goes; a changed one is not."""
    trace = record(tmp_path / "trace")
    run(trace, steps=2, output=tmp_path / "run")
    with forkpoint.record(tmp_path / "trace", resume=True) as more:
        more.add(batches()[0])
    _, report = run(open_trace(tmp_path / "trace"), steps=2, output=tmp_path / "run", resume=True)
    assert report.resumed_at == 2 and len((tmp_path / "run" / ROWS).read_bytes().splitlines()) == 2
    other = record(tmp_path / "other", [{}, {}, {}])
    with pytest.raises(ConfigError, match=r"batches\.digest was .* and is now"):
        run(other, steps=2, output=tmp_path / "run", resume=True)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with forkpoint.record(tmp_path / "trace"):
        pass
    with pytest.raises(ConfigError, match="no complete batch yet"):
        TraceBatches(open_trace(tmp_path / "trace"), 3)


@pytest.mark.parametrize("option", ["--limit", "--groups-per-step"])
def test_options_that_have_no_meaning_are_refused(
    option: str, shell: Shell, tmp_path: Path
) -> None:
    record(tmp_path / "trace")
    config = write_config(tmp_path / "config.json")
    done = shell("replay", tmp_path / "trace", "--model", config, option, 2)
    assert done.code == 2 and option.strip("-").replace("-", "_") in done.err
