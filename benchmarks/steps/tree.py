"""Real rollouts that fork, against the counted bound of their trees."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from tyro.conf import Positional, arg

from benchmarks.rows import ResultRow
from benchmarks.runner import Deadline
from benchmarks.shapes import checkpoint, read_rollouts
from benchmarks.steps.cells import cell_row
from benchmarks.steps.options import Steps
from benchmarks.steps.stepper import DENSE, Stepper
from forkpoint.apps.cli.options import Count, MemoryText
from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import RolloutBatch

REPEATS = 3
"""How often each side of a group is timed, in turn; its median counts."""


@dataclass(frozen=True, kw_only=True)
class Tree(Steps):
    """Time real rollouts that fork, group by group, against the counted bound of their trees.

    With a tiny model token ids are folded into its vocabulary. Groups of equal rewards have
    advantages of 0, and gradients of nothing but zeros: a GPU takes less power and less time for
    these, so such groups get random advantages.

    Attributes:
        file: Rollouts: one JSON object a line, plain, gzip or zstd.
        most_tokens: Leave out groups of more tokens than this.
        shape: Whose sizes the model has. qwen3.5-4b is a hybrid; both sides checkpoint its blocks.
        memory_limit: The most memory for the rollouts and for what is read to make them, such as
            8GB.
    """

    NAME: ClassVar[str] = "tree"

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    most_tokens: Count = 131_072
    shape: Literal["qwen3-4b", "qwen3.5-4b"] = "qwen3-4b"
    memory_limit: MemoryText = None

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        stepper = self.stepper(self.shape)
        if self.shape == "qwen3.5-4b":
            checkpoint(stepper.model)
        batch = RolloutBatch(
            read_rollouts(
                self.file, vocab=stepper.vocab, tiny=self.tiny, memory_limit=self.memory_limit
            )
        )
        drawn, groups = 0, []
        for members in batch.groups():
            group = batch.select(members.tolist())
            if all(not np.any(rollout.advantage) for rollout in group):
                group, drawn = with_advantages(group, seed=drawn), drawn + 1
            groups.append(group)
        fitting = [g for g in groups if g.logical_tokens <= self.most_tokens and g.trained_tokens]
        if not fitting:
            raise ConfigError(
                f"no group of {self.file} has at most {self.most_tokens} tokens; "
                "raise --most-tokens."
            )
        name = self.file.name
        case = f"{self.shape} {stepper.mode} {name}"
        sums = np.zeros(4)
        used = 0
        for group in fitting:
            if deadline.over(f"group {used} of {name}"):
                break
            found = _measured(stepper, group)
            yield from _rows(f"{case}, group {used}", found, "")
            sums += found
            used += 1
        if used:
            note = f"{used} of {len(groups)} groups, each a batch; "
            note += f"at most {self.most_tokens} tokens a group"
            if drawn:
                note += f"; advantages of {drawn} groups were all 0, and drawn at random"
            yield from _rows(case, sums.tolist(), ", sum", note=note)
            bound = sums[2] / sums[3]
            beside = {"baseline": "dense", "baseline_leaves_out": True, "bound": bound}
            yield cell_row("tree", case, "speed-up", sums[0] / sums[1], "x", note=note, **beside)


def _measured(stepper: Stepper, group: RolloutBatch) -> list[float]:
    """Milliseconds and FLOPs of a group's step: dense ms, shared ms, dense FLOPs, shared FLOPs."""
    # Both sides with microbatches as long as memory allows.
    policy = stepper.configured(sharing="tree", memory_budget=stepper.budget_bytes)
    alone = stepper.configured(**DENSE, memory_budget=stepper.budget_bytes)
    # A kernel may be compiled at the first lengths of a kind: the first time does not count.
    stepper.step(alone, group)
    stepper.step(policy, group)
    dense, shared = stepper.planned(alone, group), stepper.planned(policy, group)
    for _ in range(REPEATS):
        stepper.repeat(alone, group, repeats=1, into=dense)
        stepper.repeat(policy, group, repeats=1, into=shared)
    plan, shape = shared.plan, shared.plan.shape
    assert shape is not None
    flops = [plan.dense.step_flops(shape), plan.shared.step_flops(shape)]
    return [dense.typical_ms, shared.typical_ms, *flops]


def _rows(
    case: str, found: Sequence[float], suffix: str, *, note: str | None = None
) -> Iterator[ResultRow]:
    dense_ms, shared_ms, dense_flops, shared_flops = found
    bound = dense_flops / shared_flops
    row = partial(cell_row, "tree", case, note=note)
    yield row(f"dense step{suffix}", dense_ms, "ms")
    yield row(f"shared step{suffix}", shared_ms, "ms")
    yield row("share of bound", dense_ms / shared_ms / bound, "1", bound=bound)


def with_advantages(group: RolloutBatch, *, seed: int) -> RolloutBatch:
    """The same rollouts with random advantages, one each."""
    rng = np.random.default_rng(seed)
    return RolloutBatch(replace(rollout, advantage=float(rng.normal())) for rollout in group)
