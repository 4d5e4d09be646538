"""`forkpoint replay` and the loop below it: real steps, shared and dense, from one state."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Shell, changed, made_up_rollouts

from forkpoint import Config, ConfigError, Rollout, RolloutBatch, load_rollouts, save_rollouts, wrap
from forkpoint.apps.cli import torchrun
from forkpoint.apps.cli.models import load_model
from forkpoint.apps.cli.options import Runtime
from forkpoint.apps.cli.replay import make_optimizer
from forkpoint.apps.replay import loop as replay_loop
from forkpoint.apps.replay.loop import replay
from forkpoint.apps.replay.records import ReplayStep
from forkpoint.losses import GRPO, LogLikelihood
from forkpoint.testing import lifted_upcasts, tiny_model
from forkpoint.verify.dense import dense_run

FIELDS = {
    *("format", "skipped"),
    *("command", "steps", "rollouts", "logical_tokens", "unique_tokens", "computed_tokens"),
    "left_out_tokens",
    *("microbatches", "plans", "bound", "speedup", "median_speedup"),
    *("max_loss_difference", "max_parameter_difference", "mean_parameter_difference"),
    *("mean_absolute_parameter_difference", "rms_parameter_difference", "rms_parameter_change"),
    *("resumed_at", "config", "device", "versions"),
    *(
        f"{way}_{name}"
        for way in ("shared", "dense")
        for name in (
            *("ms", "median_ms", "step_ms", "losses", "gradient_norms", "peak_memory_bytes"),
            *("router_losses", "phase_ms"),
        )
    ),
}
TINY_QWEN3 = Path(__file__).parents[2] / "examples" / "tiny-qwen3.json"


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


# The loop -----------------------------------------------------------------------------------------


def test_it_trains_as_ordinary_training_does() -> None:
    """Against the stock model's own forward and a loop written out here."""
    model = tiny_model("qwen3")
    twin = copy.deepcopy(model)
    batch = RolloutBatch(made_up_rollouts())
    expected = []
    optimizer = sgd(list(twin.parameters()))
    with lifted_upcasts(model):
        report = replay(model, batch, GRPO(), optimizer=sgd, steps=4)
        for step in range(4):
            part = batch.select([3 * (step % 3) + n for n in range(3)])
            run = dense_run(twin, part, GRPO())
            expected.append(run.loss)
            for name, parameter in twin.named_parameters():
                parameter.grad = run.gradients[name]
            optimizer.step()
    np.testing.assert_allclose([s.shared.loss for s in report.steps], expected, atol=1e-12)
    assert np.ptp(expected) > 1e-3, "the losses show nothing"
    assert report.difference is not None
    assert report.difference.max < 1e-12 < 1e-4 < report.difference.rms_change
    for (name, trained), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(trained, other, rtol=0, atol=1e-11, msg=name)
        assert trained.grad is None


def test_difference_between_the_parameters() -> None:
    """With different learning rates, by the same numbers computed in one piece."""
    model = tiny_model("llama", dtype=torch.float32)
    start = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    ends: list[list[torch.nn.Parameter]] = []

    def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        ends.append(parameters)
        return torch.optim.SGD(parameters, lr=float(len(ends)))

    batch = RolloutBatch(made_up_rollouts())
    report = replay(model, batch, LogLikelihood(), optimizer=optimizer, steps=1)
    dense, shared = (torch.cat([p.detach().double().flatten() for p in end]) for end in ends)
    assert shared.data_ptr() != dense.data_ptr() and report.difference is not None
    apart = (shared - dense).abs()
    assert report.difference.max == pytest.approx(float(apart.max()))
    assert report.difference.mean == pytest.approx(float((shared - dense).mean()))
    assert report.difference.mean_absolute == pytest.approx(float(apart.mean()))
    assert report.difference.rms == pytest.approx(float(apart.square().mean().sqrt()))
    moved = float((dense - start).square().mean().sqrt())
    assert report.difference.rms_change == pytest.approx(moved)
    # Shared took steps of twice the length, so that the two are as far apart as dense moved.
    assert report.difference.rms == pytest.approx(moved, rel=1e-3)


def test_gradient_norms_and_clipping() -> None:
    """By the same numbers from the stock model; both sides are scaled alike."""
    batch = RolloutBatch(made_up_rollouts())
    model = tiny_model("qwen3")
    gradients = dense_run(model, batch.select([0, 1, 2]), GRPO()).gradients.values()
    flat = torch.cat([g.flatten() for g in gradients if g is not None])
    norm = float(flat.norm())
    report = replay(
        *(copy.deepcopy(model), batch, GRPO()),
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        steps=1,
        max_grad_norm=norm / 4,
    )
    (step,) = report.steps
    assert step.dense is not None and step.difference is not None
    assert step.dense.sharing == "none" and step.dense.flops == step.dense_flops
    assert step.shared.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert step.dense.gradient_norm == pytest.approx(norm, rel=1e-5)
    moved = norm / 4 / len(flat) ** 0.5
    assert step.difference.rms_change == pytest.approx(moved, rel=1e-5)
    assert step.difference.rms < 1e-5 * moved


def test_a_loss_that_is_nan_makes_the_difference_nan() -> None:
    batch = RolloutBatch(made_up_rollouts())
    options: dict[str, Any] = {"optimizer": sgd, "steps": 2}
    report = replay(tiny_model("qwen3"), batch, GRPO(), **options)
    first, last = report.steps
    diverged = replace(last, shared=replace(last.shared, loss=math.nan))
    found = replace(report, steps=(first, diverged)).to_dict()["max_loss_difference"]
    assert math.isnan(found)


@pytest.mark.parametrize("rate", [-1.0, math.nan, 1e300])
def test_rates_that_no_optimizer_takes(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"lr is .*; it takes a number from 0 to 1e\+30"):
        make_optimizer("sgd", rate)


def test_events_have_their_times() -> None:
    """One time an event; together they are the phases."""
    report = replay(
        tiny_model("qwen3"),
        RolloutBatch(made_up_rollouts()),
        # A joint loss over several rows: log-probs first, and these events count as well.
        lambda outputs, batch: -((outputs.logprobs * batch.advantages).sum() ** 2),
        optimizer=sgd,
        steps=1,
        config=Config(sharing="tree", boundary="across", max_microbatch_tokens=24),
    )
    for record in (report.steps[0].shared, report.steps[0].dense):
        assert record is not None
        assert len(record.event_ms) == len(record.events) > 4
        assert sum(record.event_ms) == pytest.approx(sum(record.phase_ms.values()))
    assert report.steps[0].shared.phase_ms["prefix forward"] > 0


def test_processes_of_torchrun_are_refused(
    shell: Shell, rollouts: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in torchrun.VARIABLES:
        monkeypatch.setenv(name, "0")
    ran = shell("replay", rollouts, "--model", config)
    assert ran.code == 2 and "replay trains a model of one process" in ran.err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_memory_is_measured_on_cuda() -> None:
    report = replay(
        tiny_model("qwen3", dtype=torch.bfloat16, hidden_size=64, head_dim=64).cuda(),  # pyright: ignore
        RolloutBatch(made_up_rollouts()),
        GRPO(),
        optimizer=sgd,
        steps=2,
        config=Config(sharing="tree", boundary="across", max_microbatch_tokens=24),
    )
    for record in (report.steps[1].shared, report.steps[1].dense):
        assert record is not None and record.peak_memory_bytes is not None
        assert record.peak_memory_bytes > 0
        assert sum(record.event_ms) <= record.ms


def test_groups_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, ...]] = []
    real = replay_loop._Side.step

    def step(self: Any, given: Any, *others: Any) -> Any:
        groups = sorted({str(group) for group in given.batch.group_ids})
        order.append((self.policy.config.sharing, *groups))
        return real(self, given, *others)

    monkeypatch.setattr(replay_loop._Side, "step", step)
    seen: list[ReplayStep] = []
    report = replay(
        tiny_model("qwen3"),
        RolloutBatch(made_up_rollouts()),
        GRPO(),
        optimizer=sgd,
        steps=3,
        groups_per_step=2,
        on_step=seen.append,
    )
    assert order == [
        *(("none", "g0", "g1"), ("auto", "g0", "g1")),
        *(("auto", "g0", "g2"), ("none", "g0", "g2")),
        *(("none", "g1", "g2"), ("auto", "g1", "g2")),
    ]
    assert tuple(seen) == report.steps


def test_nothing_is_trained_when_a_later_group_is_refused() -> None:
    """A token beyond the vocabulary in the last group is found before the first step."""
    made = made_up_rollouts()
    made[-1] = changed(made[-1], token_ids=np.append(made[-1].token_ids[:-1], 1000))
    model = tiny_model("qwen3")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="vocabulary"):
        replay(model, RolloutBatch(made), GRPO(), optimizer=sgd, steps=3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


# The command --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ("--sharing", "tree", "--boundary", "across", "--max-microbatch-tokens", 24),
        ("--gradient-checkpointing", "--optimizer", "sgd", "--groups-per-step", 3),
    ],
    ids=["across", "checkpointed"],
)
def test_losses_and_parameters_are_those_of_dense(
    options: tuple[object, ...], shell: Shell, rollouts: Path, config: Path
) -> None:
    done = shell(
        *("replay", rollouts, "--model", config, "--baseline", "dense", "--dtype", "float64"),
        *("--steps", 3, "--lr", 1e-3, *options),
    )
    assert done.code == 0 and done.err == ""
    result = done.result
    assert set(result) == FIELDS
    assert len(result["shared_losses"]) == result["steps"] == 3
    # Stock transformers computes norms in float32 even here, hence no 1e-12.
    np.testing.assert_allclose(result["shared_losses"], result["dense_losses"], atol=1e-6)
    apart = np.abs(np.subtract(result["shared_losses"], result["dense_losses"])).max()
    assert result["max_loss_difference"] == pytest.approx(apart)
    assert result["rms_parameter_difference"] <= 1e-3 * result["rms_parameter_change"]
    assert result["rms_parameter_change"] > 1e-5, "nothing was trained"
    names = ("mean_absolute", "rms", "max")
    means = [result[f"{name}_parameter_difference"] for name in names]
    assert means == sorted(means) and abs(result["mean_parameter_difference"]) <= means[0]
    norms = (result["shared_gradient_norms"], result["dense_gradient_norms"])
    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_what_it_reports(shell: Shell, rollouts: Path, config: Path) -> None:
    arguments = ("replay", rollouts, "--model", config, "--steps", 3)
    done = shell(*arguments, "--baseline", "dense", "--sharing", "group", "--seed", 5)
    result = done.result
    batch = RolloutBatch(load_rollouts(rollouts))
    unique = sum(
        len({tuple(r.token_ids[:n].tolist()) for r in group for n in range(1, len(r) + 1)})
        for group in ([batch[int(i)] for i in members] for members in batch.groups())
    )
    assert result["logical_tokens"] == batch.logical_tokens
    assert result["unique_tokens"] == unique
    assert result["computed_tokens"] == unique - 3, "the first token of each group is no edge"
    assert result["rollouts"] == 9 and result["plans"] == ["group + within"]
    for way in ("shared", "dense"):
        assert result[f"{way}_ms"] == pytest.approx(sum(result[f"{way}_step_ms"]))
        assert result[f"{way}_median_ms"] == sorted(result[f"{way}_step_ms"])[1]
        phases = result[f"{way}_phase_ms"]
        assert (
            set(phases) == {"prefix forward", "leaf", "prefix backward"}
            and 0 < sum(phases.values()) < result[f"{way}_ms"]
        )
        assert result[f"{way}_peak_memory_bytes"] is None
    assert result["speedup"] == pytest.approx(result["dense_ms"] / result["shared_ms"])
    pairs = zip(result["dense_step_ms"], result["shared_step_ms"], strict=True)
    assert result["median_speedup"] == pytest.approx(sorted(d / s for d, s in pairs)[1])
    assert 1 < result["bound"] < 3
    assert result["config"]["seed"] == 5 and result["config"]["sharing"] == "group"
    assert result["config"]["file"] == str(rollouts)
    assert result["device"] == "cpu" and result["versions"]["torch"] == torch.__version__
    text = done.out
    for word in ("shared loss", "dense ms", "speed-up: ", "bound", "first step includes warm-up"):
        assert word in text
    assert f"tokens run: {unique - 3} of {batch.logical_tokens}" in text
    for loss in result["shared_losses"]:
        assert f"{loss:.6f}" in text


def test_without_a_baseline(shell: Shell, rollouts: Path, config: Path) -> None:
    done = shell("replay", rollouts, "--model", config, "--limit", 3, "--sharing", "group")
    result = done.result
    assert set(result) == FIELDS and result["rollouts"] == 12
    for name in ("dense_ms", "dense_losses", "speedup", "max_parameter_difference"):
        assert result[name] is None
    assert result["shared_ms"] > 0 and result["bound"] > 1
    assert result["dense_phase_ms"] is None
    assert "dense ms" not in done.out and "counted bound" in done.out


def test_a_folder_with_weights(shell: Shell, rollouts: Path, tmp_path: Path) -> None:
    """Its weights are used: the losses are those of the model that was saved."""
    model = tiny_model("llama", seed=7, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    batch = RolloutBatch(load_rollouts(rollouts))
    arguments = ("replay", rollouts, "--lr", 0, "--steps", 2, "--loss", "likelihood")
    result = shell(*arguments, "--model", tmp_path / "model").result
    expected = [
        dense_run(model, batch.select(members.tolist()), LogLikelihood()).loss
        for members in batch.groups()[:2]
    ]
    np.testing.assert_allclose(result["shared_losses"], expected, rtol=1e-5)
    random = shell(*arguments, "--model", tmp_path / "model" / "config.json").result
    assert abs(random["shared_losses"][0] - expected[0]) > 0.1, "random weights must differ"


def test_options_reach_the_model(config: Path) -> None:
    first, again, other = (load_model(config, Runtime(seed=seed)) for seed in (1, 1, 2))
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    weight = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first.state_dict()[weight], other.state_dict()[weight])
    assert first.training and next(first.parameters()).dtype == torch.float32
    for checkpointed in (True, False):
        model = load_model(config, Runtime(gradient_checkpointing=checkpointed, dtype="float64"))
        assert next(model.parameters()).dtype == torch.float64
        assert wrap(model).host.shape.checkpointed is checkpointed


# Real rollouts ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "microbatch_tokens"), [("rag.jsonl", 4096), ("airline.jsonl", 192)]
)
def test_fifty_steps_of_real_rollouts(
    file: str,
    microbatch_tokens: int,
    shell: Shell,
    shared_data: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Prompts and responses are cut; short microbatches read prefix caches of others."""
    rollouts = []
    for r in load_rollouts(shared_data(file)):
        prompt = int(np.argmax(r.loss_mask))
        part = slice(max(0, prompt - 80), prompt + 32)
        rollouts.append(Rollout(r.token_ids[part], r.loss_mask[part], 1.0, group_id=r.group_id))
    save_rollouts(tmp_path / "cut.jsonl", rollouts)
    done = shell(
        *("replay", tmp_path / "cut.jsonl", "--model", TINY_QWEN3, "--loss", "likelihood"),
        *("--lr", 1e-3, "--steps", 50, "--baseline", "dense", "--sharing", "tree"),
        *("--boundary", "across", "--max-microbatch-tokens", microbatch_tokens),
    )
    result = done.result
    np.testing.assert_allclose(result["shared_losses"], result["dense_losses"], atol=1e-5)
    norms = (result["shared_gradient_norms"], result["dense_gradient_norms"])
    np.testing.assert_allclose(*norms, rtol=1e-4)
    assert 0 < result["rms_parameter_difference"] < 1e-5 * result["rms_parameter_change"]
    assert result["rms_parameter_change"] > 1e-2, "the model has hardly moved"
