"""`forkpoint replay` and the loop below it: real steps, shared and dense, from one state."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Shell, changed, made_up_rollouts, write_config, write_rollouts

from forkpoint import Config, RolloutBatch, load_rollouts, wrap
from forkpoint import replay as replay_module
from forkpoint.cli.models import load_model
from forkpoint.cli.options import Runtime
from forkpoint.dense import dense_run
from forkpoint.hosts.upcasts import lifted_upcasts
from forkpoint.losses import GRPO, LogLikelihood
from forkpoint.replay import ReplayStep, replay
from forkpoint.testing import tiny_model

FIELDS = {
    *("command", "steps", "rollouts", "logical_tokens", "unique_tokens", "computed_tokens"),
    *("rows", "plans", "bound", "speedup", "median_speedup", "phase_ms"),
    *("max_loss_difference", "max_parameter_difference", "mean_parameter_difference"),
    *("rms_parameter_difference", "rms_parameter_change", "config", "device", "versions"),
    *(
        f"{way}_{name}"
        for way in ("shared", "dense")
        for name in ("ms", "median_ms", "step_ms", "losses", "peak_memory_bytes")
    ),
}
TINY_QWEN3 = Path(__file__).parents[2] / "examples" / "tiny-qwen3.json"


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    return write_rollouts(tmp_path / "rollouts.jsonl")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "config.json")


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
    assert report.difference.mean == pytest.approx(float(apart.mean()))
    assert report.difference.rms == pytest.approx(float(apart.square().mean().sqrt()))
    moved = float((dense - start).square().mean().sqrt())
    assert report.difference.rms_change == pytest.approx(moved)
    # Shared took steps of twice the length, so that the two are as far apart as dense moved.
    assert report.difference.rms == pytest.approx(moved, rel=1e-3)


def test_groups_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, ...]] = []
    real = replay_module._Side.step

    def step(self: Any, batch: RolloutBatch, loss: Any) -> Any:
        groups = sorted({str(group) for group in batch.group_ids})
        order.append((self.policy.config.sharing, *groups))
        return real(self, batch, loss)

    monkeypatch.setattr(replay_module._Side, "step", step)
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


def test_dense_is_dense_whatever_shared_is_asked_to_be() -> None:
    report = replay(
        tiny_model("qwen3"),
        RolloutBatch(made_up_rollouts()),
        GRPO(),
        optimizer=sgd,
        steps=1,
        config=Config(sharing="tree", boundary="across_rows", waves="padded", max_row_tokens=64),
    )
    (step,) = report.steps
    assert step.dense is not None
    assert (step.shared.sharing, step.shared.boundary) == ("tree", "across_rows")
    assert step.dense.sharing == "none"
    assert step.dense.computed_tokens == step.logical_tokens - step.rollouts
    assert step.dense.flops == step.dense_flops
    assert report.bound == pytest.approx(step.dense_flops / step.shared.flops) != 1


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
        (),
        ("--sharing", "group", "--boundary", "in_row", "--optimizer", "sgd"),
        ("--sharing", "tree", "--boundary", "across_rows", "--max-row-tokens", 24),
        ("--sharing", "group", "--boundary", "mixed", "--waves", "padded"),
        ("--sharing", "none", "--gradient-checkpointing"),
        ("--loss", "gspo", "--sharing", "tree", "--boundary", "across_rows"),
        ("--loss", "likelihood", "--groups-per-step", 3),
    ],
    ids=lambda options: " ".join(map(str, options)) or "defaults",
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
    means = [result[f"{name}_parameter_difference"] for name in ("mean", "rms", "max")]
    assert means == sorted(means)


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
    assert result["rollouts"] == 9 and result["plans"] == ["group + in_row"]
    for way in ("shared", "dense"):
        assert result[f"{way}_ms"] == pytest.approx(sum(result[f"{way}_step_ms"]))
        assert result[f"{way}_median_ms"] == sorted(result[f"{way}_step_ms"])[1]
        phases = result["phase_ms"][way]
        assert set(phases) == {"A", "B", "C"} and 0 < sum(phases.values()) < result[f"{way}_ms"]
        assert result[f"{way}_peak_memory_bytes"] is None
    assert result["speedup"] == pytest.approx(result["dense_ms"] / result["shared_ms"])
    assert 1 < result["bound"] < 3
    assert result["config"]["seed"] == 5 and result["config"]["sharing"] == "group"
    assert result["config"]["file"] == str(rollouts)
    assert result["device"] == "cpu" and result["versions"]["torch"] == torch.__version__
    text = "\n".join(done.out.splitlines()[:-1])
    for word in ("shared loss", "dense ms", "speed-up: ", "bound", "first step includes warm-up"):
        assert word in text
    assert f"tokens run: {unique - 3} of {batch.logical_tokens} given" in text
    for loss in result["shared_losses"]:
        assert f"{loss:.6f}" in text


def test_without_a_baseline(shell: Shell, rollouts: Path, config: Path) -> None:
    done = shell("replay", rollouts, "--model", config, "--limit", 3)
    result = done.result
    assert set(result) == FIELDS and result["rollouts"] == 12
    for name in ("dense_ms", "dense_losses", "speedup", "max_parameter_difference"):
        assert result[name] is None
    assert result["shared_ms"] > 0 and result["bound"] > 1
    assert result["phase_ms"]["dense"] is None
    assert "dense ms" not in done.out and "counted bound" in done.out


def test_json_is_one_line(shell: Shell, rollouts: Path, config: Path) -> None:
    done = shell("replay", rollouts, "--model", config, "--baseline", "dense", "--json")
    assert done.code == 0 and done.err == ""
    assert done.out.count("\n") == 1 and done.out.endswith("}\n")
    assert done.result["command"] == "replay"


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


def test_random_weights_follow_the_seed(config: Path) -> None:
    first, again, other = (load_model(config, Runtime(seed=seed)) for seed in (1, 1, 2))
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    weight = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first.state_dict()[weight], other.state_dict()[weight])


def test_gradient_checkpointing_reaches_the_model(config: Path) -> None:
    assert wrap(load_model(config, Runtime(gradient_checkpointing=True))).host.shape.checkpointed
    assert not wrap(load_model(config, Runtime())).host.shape.checkpointed


def test_dpo(shell: Shell, tmp_path: Path, config: Path) -> None:
    pairs = [
        changed(rollout, advantage=n % 2, reference_logprobs=-np.ones(len(rollout)))
        for n, rollout in enumerate(made_up_rollouts(groups=2, rollouts_per_group=2))
    ]
    file = write_rollouts(tmp_path / "pairs.jsonl", pairs)
    result = shell(
        *("replay", file, "--model", config, "--loss", "dpo", "--baseline", "dense"),
        *("--lr", 1e-3, "--sharing", "group", "--boundary", "across_rows"),
    ).result
    assert result["max_loss_difference"] < 1e-5 and result["rms_parameter_change"] > 1e-5


# Real rollouts ------------------------------------------------------------------------------------


def test_real_passages(shell: Shell, shared_data: Callable[[str], Path]) -> None:
    """Half a group whose prompt has thousands of tokens: faster as well as equal."""
    result = shell(
        *("replay", shared_data("rag.jsonl"), "--model", TINY_QWEN3, "--limit", 4),
        *("--steps", 1, "--baseline", "dense", "--json"),
    ).result
    assert result["max_loss_difference"] < 1e-5
    assert result["rms_parameter_difference"] < 1e-3 * result["rms_parameter_change"]
    assert result["bound"] > 3.5
    assert result["speedup"] > 2, "far below the bound, even for a busy machine"


def test_real_conversations(
    shell: Shell, shared_data: Callable[[str], Path], tmp_path: Path
) -> None:
    """The first turns of two tasks: trees with tool results masked, as one batch."""
    made = [
        changed(r, token_ids=r.token_ids[:2500], loss_mask=r.loss_mask[:2500])
        for r in load_rollouts(shared_data("airline.jsonl"), limit=8)
    ]
    file = write_rollouts(tmp_path / "turns.jsonl", made)
    result = shell(
        *("replay", file, "--model", TINY_QWEN3, "--loss", "likelihood", "--steps", 1),
        *("--sharing", "tree", "--boundary", "across_rows", "--max-row-tokens", 4096),
        *("--groups-per-step", 2, "--baseline", "dense", "--json"),
    ).result
    assert result["computed_tokens"] == result["unique_tokens"] - 1
    assert result["max_loss_difference"] < 1e-5
    assert result["rms_parameter_difference"] < 1e-3 * result["rms_parameter_change"]
    assert result["bound"] > 1.3
