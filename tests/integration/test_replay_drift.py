"""A hundred optimizer steps on real rollouts: shared follows dense as far as rounding lets it."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Shell, made_up_rollouts

from benchmarks.results_page import RESULTS, read_rows
from forkpoint import Config, Rollout, RolloutBatch, load_rollouts, save_rollouts
from forkpoint.apps.replay import loop as replay_loop
from forkpoint.apps.replay.folder import ROWS
from forkpoint.apps.replay.loop import replay
from forkpoint.losses import LogLikelihood
from forkpoint.testing import tiny_model

STEPS = 100
LR = 1e-3
NOISE = 6.4
"""Up to so many standard errors a slope is noise. By chance it is more in one of 1,000 series with
independent gains, and in one of 70 where each gain keeps 0.9 of the one before (simulated; normal
quantiles do not hold with so long a lag)."""
FLOAT32_EPS = float(np.finfo(np.float32).eps)
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
# Prompts and responses are cut; the second file shares across microbatches.
FILES: dict[str, tuple[object, ...]] = {
    "rag.jsonl": (),
    "airline.jsonl": (
        *("--sharing", "tree", "--boundary", "across", "--max-microbatch-tokens", 192),
    ),
}


def slope_in_errors(values: list[float]) -> float:
    """The mean change of a series per step, in standard errors.

    A difference that comes of rounding alone is a random walk: its gains have mean 0. Gains
    resemble those before them for long, because training carries on with the parameters that an
    early rounding has moved; so the standard error is that of Kiefer and Vogelsang (2005), with
    Bartlett weights up to a third of the series.
    """
    gains = np.diff(np.asarray(values), prepend=0.0)
    count, around = len(gains), gains - gains.mean()
    variance, lag = float(around @ around) / count, count // 3
    for distance in range(1, lag):
        related = float(around[distance:] @ around[:-distance]) / count
        variance += 2 * (1 - distance / lag) * related
    return float(gains.mean()) / float(np.sqrt(variance / count))


def cut(rollouts: Iterable[Rollout], prompt_tokens: int = 80, more: int = 32) -> Iterator[Rollout]:
    """The last tokens of each group's prompt, and the first of what follows."""
    batch = RolloutBatch(rollouts)
    for members in batch.groups():
        group = [batch[int(index)] for index in members]
        prompts = [int(np.argmax(rollout.loss_mask)) for rollout in group]
        begin = max(0, min(prompts) - prompt_tokens)
        for rollout, prompt in zip(group, prompts, strict=True):
            part = slice(begin, prompt + more)
            ids, mask = rollout.token_ids[part], rollout.loss_mask[part]
            yield Rollout(ids, mask, 1.0, group_id=rollout.group_id)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_real_rollouts(
    file: str,
    shared_data: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    save_rollouts(tmp_path / "cut.jsonl", list(cut(load_rollouts(shared_data(file)))))
    done = Shell(capsys)(
        *("replay", tmp_path / "cut.jsonl", "--model", tmp_path / "config.json", *FILES[file]),
        *("--loss", "likelihood", "--lr", LR, "--steps", STEPS, "--baseline", "dense"),
        *("--output", tmp_path / "run", "--json"),
    )
    assert done.code == 0, done.err
    lines = (tmp_path / "run" / ROWS).read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    differences = [step["difference"] for step in steps]
    last = differences[-1]
    assert last["rms_change"] > 10 * LR, "the model has hardly moved"
    # Of what the model moves in a step, one rounding is not shared; they do not all add up.
    assert 0 < last["rms"] <= FLOAT32_EPS * STEPS * last["rms_change"]
    # Adam moves an element whose gradient is next to nothing by up to the learning rate, in a
    # direction that rounding can turn; such elements are no further apart than one step is long.
    assert max(difference["max"] for difference in differences) < LR
    errors = slope_in_errors([difference["mean"] for difference in differences])
    assert abs(errors) <= NOISE, f"the mean drifts by {errors:.1f} standard errors"
    for step in steps:
        shared, dense = step["shared"], step["dense"]
        assert shared["loss"] == pytest.approx(dense["loss"], abs=1e-5)
        assert shared["gradient_norm"] == pytest.approx(dense["gradient_norm"], rel=1e-4)
        assert shared["computed_tokens"] < 0.8 * dense["computed_tokens"]


@pytest.mark.parametrize("file", FILES)
def test_kept_replays_do_not_drift(file: str) -> None:
    """Of parameters shared less dense, in the rows of each step on an H200."""
    rows = read_rows(RESULTS / "replay-h200.jsonl")
    steps = [r["step"] for r in rows if r["metric"] == "step" and r["case"].startswith(file)]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert abs(slope_in_errors([step["difference"]["mean"] for step in steps])) <= NOISE


def means(monkeypatch: pytest.MonkeyPatch, *, biased: bool) -> list[float]:
    """Mean differences of a replay; where biased, the shared side rounds down."""
    real = replay_loop._Side.step

    def step(self: Any, *arguments: Any) -> Any:
        result = real(self, *arguments)
        if biased and self.policy.config.sharing != "none":
            with torch.no_grad():
                for parameter in self.parameters:
                    down = torch.full_like(parameter, -torch.inf)
                    parameter.copy_(torch.nextafter(parameter, down))
        return result

    monkeypatch.setattr(replay_loop._Side, "step", step)
    report = replay(
        tiny_model("qwen3", dtype=torch.float32),
        RolloutBatch(made_up_rollouts()),
        LogLikelihood(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LR),
        steps=40,
        config=Config(sharing="group"),
    )
    return [step.difference.mean for step in report.steps if step.difference is not None]


@pytest.mark.slow
def test_one_sided_rounding_is_a_trend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drift that the bar must find: a unit in the last place a step, always downwards."""
    assert slope_in_errors(means(monkeypatch, biased=True)) < -NOISE


@pytest.mark.slow
def test_rounding_to_nearest_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(slope_in_errors(means(monkeypatch, biased=False))) <= NOISE
