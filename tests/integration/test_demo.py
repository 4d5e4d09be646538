"""`forkpoint demo`: its sampler, its steps, what it writes and what it says, at reduced size."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Shell
from transformers import PreTrainedModel

from forkpoint import Policy, Rollout, RolloutBatch, wrap
from forkpoint.apps.cli.demo import GRADIENT_BAR
from forkpoint.apps.demo.loop import Loop, Task
from forkpoint.apps.demo.sampling import sample
from forkpoint.apps.demo.task import reward
from forkpoint.engine.engine import Engine
from forkpoint.errors import ConfigError
from forkpoint.testing import dense_run, lifted_upcasts, tiny_model

SHORT = ("--groups", 2, "--rollouts-per-group", 4, "--prompt-tokens", 48, "--response-tokens", 5)
TASK = Task(groups=2, rollouts_per_group=3, prompt_tokens=20, response_tokens=7)
WORDS: dict[str, Any] = {"vocab_size": 60}


@pytest.fixture
def run(shell: Shell, tmp_path: Path) -> Callable[..., Any]:
    """The demo with short sequences, its output in a new folder."""
    return lambda *more: shell("demo", *SHORT, "--output", tmp_path / "made" / "here", *more)


def sgd_loop(model: PreTrainedModel, seed: int = 0, lr: float = 1.0) -> Loop:
    return Loop(model, torch.optim.SGD(model.parameters(), lr=lr), TASK, seed)


# The sampler --------------------------------------------------------------------------------------


def test_the_samplers_logprobs_are_the_scores() -> None:
    model = tiny_model("qwen3")
    prompts = torch.randint(61, (3, 19), generator=torch.Generator().manual_seed(1))
    with lifted_upcasts(model):
        ids_GNR, logprobs_GNR = sample(
            model, prompts, responses=4, tokens=9, generator=torch.Generator().manual_seed(2)
        )
        assert ids_GNR.shape == logprobs_GNR.shape == (3, 4, 9)
        batch = RolloutBatch(
            Rollout([*prompt, *response], [0] * 19 + [1] * 9, 1.0, group_id=f"g{group}")
            for group, prompt in enumerate(prompts.tolist())
            for response in ids_GNR[group].tolist()
        )
        scores = wrap(model).score(batch).logprobs
    trained = scores[torch.from_numpy(batch.loss_mask.astype(bool))]
    assert float((trained - logprobs_GNR.flatten()).abs().max()) < 1e-10
    assert logprobs_GNR.std() > 0.1, "all tokens are equally likely: nothing was compared"
    responses = {tuple(r) for group in ids_GNR.tolist() for r in group}
    assert len(responses) == 12, "responses repeat"


def test_the_sampler_draws_from_the_models_distribution() -> None:
    """At temperature 1: frequencies of many first tokens are the probabilities of the model."""
    model = tiny_model("qwen3", dtype=torch.float32)
    prompt = torch.tensor([[5, 17, 3]])
    with torch.no_grad():
        expected = model(input_ids=prompt).logits[0, -1].softmax(-1)
    count = 20_000
    ids_GNR, _ = sample(
        model, prompt, responses=count, tokens=1, generator=torch.Generator().manual_seed(0)
    )
    found = torch.bincount(ids_GNR.flatten(), minlength=61) / count
    error = (expected * (1 - expected) / count).sqrt()
    assert float(((found - expected).abs() / error).max()) < 5
    assert float(expected.max()) > 2 / 61, "the distribution is flat: any temperature would pass"


def test_the_sampler_leaves_no_trace_and_needs_finite_logits() -> None:
    model = tiny_model("qwen3", dtype=torch.float32)
    prompt = torch.tensor([[5, 17, 3]])
    generator = torch.Generator().manual_seed(0)
    state = torch.get_rng_state()
    sample(model, prompt, responses=2, tokens=2, generator=generator)
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        model.get_output_embeddings().weight[7] = torch.nan
    with pytest.raises(ConfigError, match="diverged"):
        sample(model, prompt, responses=2, tokens=2, generator=generator)


# The loop -----------------------------------------------------------------------------------------


def test_rollouts_are_rewarded_by_the_rule_and_normalised_within_groups() -> None:
    loop = sgd_loop(tiny_model("qwen3", dtype=torch.float32, **WORDS))
    rollouts = loop.rollouts()
    rewards = np.array(
        [reward(r.token_ids[:20].copy(), r.token_ids[20:].copy()) for r in rollouts.batch]
    ).reshape(2, 3)
    np.testing.assert_array_equal(rollouts.rewards_GN, rewards)
    assert rewards.std(1).min() > 0, "a group of equal rewards shows nothing"
    advantages = np.array([float(np.max(r.advantage)) for r in rollouts.batch]).reshape(2, 3)
    expected = (rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True)
    np.testing.assert_allclose(advantages, expected)
    assert [r.loss_mask.sum() for r in rollouts.batch] == [7] * 6
    assert rollouts.batch.groups()[1].tolist() == [3, 4, 5]


@pytest.mark.parametrize("number", [1, 2], ids=["dense first", "shared first"])
def test_a_step_applies_the_gradient_of_ordinary_training(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared one, and never the dense one, which is made twice as large in one case."""
    model = tiny_model("qwen3", **WORDS)
    with lifted_upcasts(model):
        loop = sgd_loop(model)
        # What the host takes for so small a model leaves no gain for sharing.
        loop.shared = loop.shared.with_config(sharing="group")
        rollouts = loop.rollouts()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        expected = dense_run(model, rollouts.batch, loop.loss).gradients
        right = loop.dense.forward_backward
        twice = lambda *given: right(*given, scale=float(number))  # noqa: E731
        monkeypatch.setattr(loop.dense, "forward_backward", twice)
        step = loop.step(number, rollouts)
    norm = float(torch.stack([g.norm() for g in expected.values() if g is not None]).norm())
    assert step.gradient_norm == pytest.approx(number * norm, rel=1e-10) and norm > 0
    for name, parameter in model.named_parameters():
        gradient = expected[name]
        assert gradient is not None
        moved = before[name] - parameter.detach()
        assert float((moved - gradient).abs().max()) < 1e-10 * norm
        assert parameter.grad is None
    assert 0 < abs(step.gradient_difference - (number - 1) / 2) < 1e-12
    assert 0 < step.sampler_logprob_difference < 1e-10
    assert step.shared_first == (number == 2)
    assert (step.logical_tokens, step.reward) == (6 * 27, rollouts.rewards_GN.mean())
    assert step.computed_tokens < step.logical_tokens and step.dense_flops > step.shared_flops


def test_dense_takes_the_row_length_that_was_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = sgd_loop(tiny_model("qwen3", dtype=torch.float32, **WORDS))
    batch = loop.rollouts().batch
    ms = {27: 3.0, 4 * 27: 1.0, None: 2.0}
    seen = []

    def gradient(policy: Policy, part: RolloutBatch) -> tuple[None, float, None]:
        seen.append((policy.config.sharing, policy.config.max_microbatch_tokens, len(part)))
        return None, ms[policy.config.max_microbatch_tokens], None

    monkeypatch.setattr(loop, "_gradient", gradient)
    loop.warm_up(batch)
    assert loop.dense.config.max_microbatch_tokens == 4 * 27
    assert seen[0] == ("auto", None, 6)
    assert set(seen[1:]) == {("none", limit, 3) for limit in ms}


# The command --------------------------------------------------------------------------------------


def test_what_it_writes_and_says(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("--steps", 3)
    assert done.code == 0, done.out + done.err
    result = done.result
    assert result["passed"] and 0 < result["gradient_error"] < 1e-10
    assert 0 < result["max_gradient_difference"] < 1e-5
    assert 0 < result["max_sampler_logprob_difference"] < 1e-4
    assert result["computed_tokens"] < result["logical_tokens"] == 3 * 8 * 53
    assert (result["steps"], result["rollouts"]) == (3, 24)
    assert result["bound"] > 1 and result["speedup"] > 0
    assert result["speedup"] == pytest.approx(result["dense_ms"] / result["shared_ms"])
    assert result["reward_rose"] is None and "too few to tell" in done.out
    folder = tmp_path / "made" / "here"
    assert result["rows_file"] == str(folder / "demo.jsonl")
    rows = [json.loads(line) for line in (folder / "demo.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["shared_first"] for row in rows] == [False, True, False]
    for name in ("reward", "sampling_ms", "shared_ms", "dense_ms"):
        listed = "rewards" if name == "reward" else f"{name.removesuffix('_ms')}_step_ms"
        assert [row[name] for row in rows] == result[listed]
    assert max(row["gradient_difference"] for row in rows) == result["max_gradient_difference"]
    for word in ("Reward: ", "agreement in float64: ", "passed", "speed-up: ", "tokens run: "):
        assert word in done.out
    assert f"counted bound {result['bound']:.2f}x" in done.out


def test_its_seed_is_that_of_weights_prompts_and_sampling(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def sampled(
        model: PreTrainedModel, prompts: torch.Tensor, *, generator: torch.Generator, **_: Any
    ) -> None:
        weights = next(model.parameters())
        seen.append((weights.tolist(), prompts.tolist(), generator.initial_seed()))
        raise ConfigError("this was to be sampled")

    monkeypatch.setattr("forkpoint.apps.demo.loop.sample", sampled)
    for seed in (7, 7, 8):
        assert "to be sampled" in run("--seed", seed).err
    first, again, other = seen
    assert first == again
    assert [a == b for a, b in zip(first, other, strict=True)] == [False] * 3
    assert (first[-1], other[-1]) == (7, 8)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run(run: Callable[..., Any]) -> None:
    rewards = [run("--steps", 3, "--seed", s, "--json").result["rewards"] for s in (1, 1, 2)]
    assert rewards[0] == rewards[1] != rewards[2]


@pytest.mark.slow
def test_reward_rises(shell: Shell, tmp_path: Path) -> None:
    done = shell(
        *("demo", "--prompt-tokens", 64, "--response-tokens", 8, "--steps", 40),
        *("--groups", 4, "--rollouts-per-group", 8, "--output", tmp_path),
    )
    result = done.result
    assert done.code == 0 and result["reward_rose"] is True and "it rose" in done.out
    assert result["first_quarter_reward"] < 0.45
    assert result["last_quarter_reward"] > result["first_quarter_reward"] + 0.2


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.float32]
)
def test_a_wrong_gradient_fails_it(
    dtype: torch.dtype, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared gradients of one dtype are one part in a thousand too large."""
    right = Engine.forward_backward

    def wrong(self: Engine, *args: Any) -> Any:
        shared = self.config.sharing != "none" and self.host.shape.dtype_bytes == dtype.itemsize
        return right(self, *args[:-1], args[-1] * (1.001 if shared else 1.0))

    monkeypatch.setattr(Engine, "forward_backward", wrong)
    done = run("--steps", 2)
    assert done.code == 1 and done.result["passed"] is False
    (line,) = [line for line in done.out.splitlines() if "FAILED" in line]
    assert line.startswith(f"agreement in {str(dtype).removeprefix('torch.')}")
    apart = done.result["max_gradient_difference"]
    assert (apart > GRADIENT_BAR) == (dtype == torch.float32)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("rollouts-per-group", 1), ("lr", "nan")),
        *(("output", "file"), ("output", "file/below"), ("output", "taken")),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    option: str, value: object, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_reached(*_: object) -> None:
        raise AssertionError("something ran")

    monkeypatch.setattr(Loop, "rollouts", not_reached)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "demo.jsonl").mkdir(parents=True)
    done = shell("demo", f"--{option}", value)
    assert (done.code, done.out) == (2, "") and option in done.err
