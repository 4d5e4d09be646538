"""A hundred optimizer steps on real rollouts: shared follows dense as far as rounding lets it."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Shell, made_up_rollouts

from forkpoint import Config, Rollout, RolloutBatch, load_rollouts, save_rollouts
from forkpoint.apps.replay import loop as replay_loop
from forkpoint.apps.replay.folder import ROWS
from forkpoint.apps.replay.loop import replay
from forkpoint.apps.replay.records import read_step
from forkpoint.apps.replay.trend import trend
from forkpoint.losses import LogLikelihood
from forkpoint.testing import tiny_model

STEPS = 100
LR = 1e-3
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
    steps = [read_step(json.loads(line), "") for line in lines]
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    differences = [step.difference for step in steps if step.difference is not None]
    last = differences[-1]
    assert last.rms_change > 10 * LR, "the model has hardly moved"
    # Of what the model moves in a step, one rounding is not shared; they do not all add up.
    assert 0 < last.rms <= FLOAT32_EPS * STEPS * last.rms_change
    # Adam moves an element whose gradient is next to nothing by up to the learning rate, in a
    # direction that rounding can turn; such elements are no further apart than one step is long.
    assert max(difference.max for difference in differences) < LR
    found = trend([difference.mean for difference in differences])
    assert found.is_noise, f"the mean drifts by {found.errors:.1f} standard errors"
    for step in steps:
        assert step.dense is not None
        assert step.shared.loss == pytest.approx(step.dense.loss, abs=1e-5)
        assert step.shared.gradient_norm == pytest.approx(step.dense.gradient_norm, rel=1e-4)
        assert step.shared.computed_tokens < 0.8 * step.dense.computed_tokens


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
    found = trend(means(monkeypatch, biased=True))
    assert not found.is_noise and found.slope < 0


@pytest.mark.slow
def test_rounding_to_nearest_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trend(means(monkeypatch, biased=False)).is_noise
