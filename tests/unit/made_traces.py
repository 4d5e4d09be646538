"""Traces that tests record."""

from pathlib import Path

from forkpoint import Rollout, losses
from forkpoint.rollouts.synthetic import synthetic_rollouts
from forkpoint.rollouts.traces import record


def some(groups: int = 2, seed: int = 0) -> list[Rollout]:
    return synthetic_rollouts(
        groups=groups, rollouts_per_group=3, prompt_tokens=9, response_tokens=4, seed=seed
    )


def recorded(path: Path, batches: int = 3) -> Path:
    with record(path, loss=losses.GRPO()) as trace:
        for n in range(batches):
            trace.add(some(seed=n), {"scale": 0.5})
    return path
