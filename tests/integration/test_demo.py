"""`forkpoint demo`: its language, its sampler, and its steps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from commands import Shell
from transformers import PreTrainedModel

from forkpoint import Policy, RolloutBatch
from forkpoint.apps.cli.demo import GRADIENT_BAR
from forkpoint.apps.demo.loop import Loop, sample
from forkpoint.apps.demo.task import BLIND_REWARD, VOWELS, WORDS, dialect_of, make_prompt, reward
from forkpoint.engine.engine import Engine
from forkpoint.errors import ConfigError
from forkpoint.testing import dense_run, lifted_upcasts, tiny_model

SHORT = ("--groups", 2, "--rollouts-per-group", 4, "--prompt-tokens", 48, "--response-tokens", 5)


@pytest.fixture
def run(shell: Shell) -> Callable[..., Any]:
    """The demo with short sequences."""
    return lambda *more: shell("demo", *SHORT, *more)


def sgd_loop(dtype: torch.dtype = torch.float64) -> Loop:
    """A loop of steps of two groups of three."""
    model = tiny_model("qwen3", dtype=dtype, vocab_size=60)
    sizes = {"groups": 2, "rollouts_per_group": 3, "prompt_tokens": 20, "response_tokens": 7}
    return Loop(model, torch.optim.SGD(model.parameters(), lr=1.0), **sizes, seed=1)


def ids(text: str) -> np.ndarray:
    return np.array([WORDS.index(word) for word in text.split()])


def test_the_language_and_its_rule() -> None:
    """Half of a prompt's words are of its dialect, and a fifth of the other half."""
    for response, expected in (("bele bolo tulu", 1 / 3), ("bala bili", 0), ("bele kete", 1)):
        assert reward(ids("bala bele tele"), ids(response)) == pytest.approx(expected)
    assert reward(ids("bele bala"), ids("bala")) == 1, "of as many of each the first dialect counts"
    random = np.random.default_rng(0)
    prompts = [make_prompt(1024, random) for _ in range(400)]
    shares = [reward(prompt, prompt) for prompt in prompts]
    assert min(shares) > 0.5 and abs(np.mean(shares) - 0.6) < 0.01
    counts = np.bincount([dialect_of(prompt) for prompt in prompts], minlength=len(VOWELS))
    assert counts.min() > 400 * BLIND_REWARD * 0.7


def test_responses_differ_and_keep_the_generators_of_others() -> None:
    model = tiny_model("qwen3")
    prompts = torch.randint(61, (3, 19), generator=torch.Generator().manual_seed(1))
    state = torch.get_rng_state()
    ids_GNR = sample(model, prompts, responses=4, tokens=9, seed=2)
    assert len({tuple(r) for group in ids_GNR.tolist() for r in group}) == 12, "responses repeat"
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        model.get_output_embeddings().weight[7] = torch.nan
    with pytest.raises(ConfigError, match="diverged"):
        sample(model, prompts, responses=2, tokens=2, seed=2)


def test_the_sampler_draws_from_the_models_distribution() -> None:
    """At temperature 1: frequencies of many first tokens are the probabilities of the model."""
    model = tiny_model("qwen3", dtype=torch.float32)
    prompt = torch.tensor([[5, 17, 3]])
    with torch.no_grad():
        expected = model(input_ids=prompt).logits[0, -1].softmax(-1)
    count = 20_000
    ids_GNR = sample(model, prompt, responses=count, tokens=1, seed=0)
    found = torch.bincount(ids_GNR.flatten(), minlength=61) / count
    error = (expected * (1 - expected) / count).sqrt()
    assert float(((found - expected).abs() / error).max()) < 5
    assert float(expected.max()) > 2 / 61, "the distribution is flat: any temperature would pass"


@pytest.mark.parametrize("number", [1, 2], ids=["dense first", "shared first"])
def test_a_step_applies_the_gradient_of_ordinary_training(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared one, and never the dense one, which is made twice as large in one case."""
    loop = sgd_loop()
    model = loop.model
    with lifted_upcasts(model):
        # What the host takes for so small a model leaves no gain for sharing.
        loop.shared = loop.shared.with_config(sharing="group")
        sampled = loop.rollouts()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        expected = dense_run(model, sampled.batch, loop.loss).gradients
        right = loop.dense.forward_backward
        twice = lambda *given: right(*given, scale=float(number))  # noqa: E731
        monkeypatch.setattr(loop.dense, "forward_backward", twice)
        step = loop.step(number, sampled)
    norm = float(torch.stack([g.norm() for g in expected.values() if g is not None]).norm())
    for name, parameter in model.named_parameters():
        gradient = expected[name]
        assert gradient is not None and parameter.grad is None
        moved = before[name] - parameter.detach()
        assert float((moved - gradient).abs().max()) < 1e-10 * norm
    assert abs(step.gradient_difference - (number - 1) / 2) < 1e-12
    rewards = np.array([reward(r.token_ids[:20].copy(), r.token_ids[20:]) for r in sampled.batch])
    assert (step.logical_tokens, step.reward) == (6 * 27, pytest.approx(rewards.mean()))
    assert step.computed_tokens < step.logical_tokens and step.dense_flops > step.shared_flops
    of_groups = rewards.reshape(2, 3)
    normal = (of_groups - of_groups.mean(1, keepdims=True)) / of_groups.std(1, keepdims=True)
    np.testing.assert_allclose([r.advantage for r in sampled.batch], normal.flatten())


def test_dense_takes_the_row_length_that_was_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = sgd_loop(torch.float32)
    batch = loop.rollouts().batch
    ms = {27: 3.0, 4 * 27: 1.0, None: 2.0}
    seen = []

    def gradient(policy: Policy, part: RolloutBatch) -> tuple[None, float, None]:
        seen.append((policy.config.sharing, policy.config.max_microbatch_tokens, len(part)))
        return None, ms[policy.config.max_microbatch_tokens], None

    monkeypatch.setattr(loop, "_gradient", gradient)
    loop.warm_up(batch)
    assert loop.dense.config.max_microbatch_tokens == 4 * 27
    assert seen[0] == ("auto", None, 6) and set(seen[1:]) == {("none", n, 3) for n in ms}


def test_what_it_says(run: Callable[..., Any]) -> None:
    done = run("--steps", 3)
    assert done.code == 0, done.out + done.err
    result = done.result
    assert result["passed"] and 0 < result["gradient_error"] < 1e-10
    assert 0 < result["max_gradient_difference"] < 1e-5
    assert result["computed_tokens"] < result["logical_tokens"] == 3 * 8 * 53
    assert (result["steps"], result["rollouts"]) == (3, 24)
    assert result["bound"] > 1
    assert result["speedup"] == pytest.approx(result["dense_ms"] / result["shared_ms"])
    assert result["first_quarter_reward"] == result["rewards"][0]
    assert result["last_quarter_reward"] == result["rewards"][-1]
    for name in ("sampling", "shared", "dense"):
        assert result[f"{name}_ms"] == pytest.approx(sum(result[f"{name}_step_ms"]))
    for word in ("Reward: ", "agreement in float64: ", "passed", "speed-up: ", "tokens run: "):
        assert word in done.out
    assert f"counted bound {result['bound']:.2f}x" in done.out


def test_its_seed_is_that_of_weights_prompts_and_sampling(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def sampled(model: PreTrainedModel, prompts: torch.Tensor, *, seed: int, **_: Any) -> None:
        seen.append((next(model.parameters()).tolist(), prompts.tolist(), seed))
        raise ConfigError("this was to be sampled")

    monkeypatch.setattr("forkpoint.apps.demo.loop.sample", sampled)
    for seed in (7, 7, 8):
        assert "to be sampled" in run("--seed", seed).err
    first, again, other = seen
    assert first == again
    assert [a == b for a, b in zip(first, other, strict=True)] == [False] * 3


@pytest.mark.slow
def test_reward_rises(shell: Shell) -> None:
    done = shell(
        *("demo", "--prompt-tokens", 64, "--response-tokens", 8, "--steps", 40),
        *("--groups", 4, "--rollouts-per-group", 8),
    )
    result = done.result
    assert done.code == 0
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
    ("option", "value", "said"),
    [
        ("rollouts-per-group", 1, "rollouts-per-group"),
        ("lr", "nan", "lr"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    option: str,
    value: object,
    said: str,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Loop, "rollouts", pytest.fail)
    done = shell("demo", f"--{option}", value)
    assert (done.code, done.out) == (2, "") and said in done.err
