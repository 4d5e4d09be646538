"""Runs the command line in this process, and makes the files that its tests read."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from forkpoint import Rollout, save_rollouts
from forkpoint.apps.cli import main
from forkpoint.apps.cli.output import Output
from forkpoint.rollouts.schema import finite
from forkpoint.rollouts.synthetic import synthetic_rollouts

VOCABULARY = 61
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Done:
    """Result of a command."""

    code: int
    out: str
    err: str
    lines: tuple[str, ...]
    """The JSON lines that it had to tell, printed or not."""

    @property
    def result(self) -> dict[str, Any]:
        """The JSON line, which --json would print."""
        (line,) = self.lines
        return json.loads(line, parse_constant=_refused)


class Shell:
    """Calls a command line, by default that of forkpoint, and captures what it writes."""

    def __init__(
        self, capsys: pytest.CaptureFixture[str], run: Callable[[Sequence[str]], int] = main
    ) -> None:
        self.capsys = capsys
        self.run = run

    def __call__(self, *arguments: object) -> Done:
        self.capsys.readouterr()
        told: list[str] = []
        result = Output.result

        def tell(out: Output, values: dict[str, Any]) -> None:
            result(out, values)
            told.append(json.dumps(finite({**values, **out.facts}), default=str, allow_nan=False))

        with mock.patch.object(Output, "result", tell):
            code = self.run([str(argument) for argument in arguments])
        return Done(code, *self.capsys.readouterr(), tuple(told))


def write_config(path: Path, **changes: Any) -> Path:
    """A configuration file of a tiny model; a change to None leaves the key out."""
    values = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    path.write_text(json.dumps(values))
    return path


def made_up_rollouts(groups: int = 3, rollouts_per_group: int = 3) -> list[Rollout]:
    """Groups whose prompts begin alike, so that group, tree and dense all differ."""
    return synthetic_rollouts(
        groups=groups,
        rollouts_per_group=rollouts_per_group,
        prompt_tokens=30,
        system_tokens=10,
        response_tokens=8,
        vocab_size=VOCABULARY,
    )


def write_rollouts(path: Path, rollouts: list[Rollout] | None = None) -> Path:
    save_rollouts(path, made_up_rollouts() if rollouts is None else rollouts)
    return path


def changed(rollout: Rollout, **changes: Any) -> Rollout:
    """The rollout with other values of some fields."""
    names = ("token_ids", "loss_mask", "advantage", "group_id", "rollout_id", "reference_logprobs")
    return Rollout(**{**{name: getattr(rollout, name) for name in names}, **changes})


def _refused(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")
