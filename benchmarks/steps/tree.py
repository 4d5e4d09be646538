"""Real rollouts that fork, against the counted bound of their trees."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from tyro.conf import Positional, arg

from benchmarks.rows import ResultRow
from benchmarks.runner import Deadline
from benchmarks.shapes import checkpoint
from benchmarks.steps.cells import cell_row
from benchmarks.steps.options import Steps
from benchmarks.steps.stepper import DENSE, Stepper
from forkpoint.apps.cli.options import Count, MemoryText
from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.traces import load_rollouts

REPEATS = 3
"""How often each side of a group is timed, in turn; its median counts."""


@dataclass(frozen=True, kw_only=True)
class Tree(Steps):
    """Time real rollouts that fork, against the counted bound of their trees.

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
        return tree(
            stepper,
            deadline,
            label=self.shape,
            file=self.file,
            most_tokens=self.most_tokens,
            tiny=self.tiny,
            memory_limit=self.memory_limit,
        )


def tree(
    stepper: Stepper,
    deadline: Deadline,
    *,
    file: Path,
    most_tokens: int,
    label: str,
    tiny: bool = False,
    memory_limit: str | None = None,
) -> Iterator[ResultRow]:
    """Real rollouts that fork, group by group, against the counted bound of their trees.

    `label` is the model's, for the rows. Groups whose rollouts have more than `most_tokens` in all
    are left out, and the note says how many; with the tiny model token ids are folded into its
    vocabulary. Groups of equal rewards have advantages of 0, and gradients of nothing but zeros: a
    GPU takes less power and less time for these, so such groups get random advantages.
    """
    rollouts = load_rollouts(file, memory_limit=memory_limit)
    if tiny:
        rollouts = [replace(r, token_ids=r.token_ids % stepper.vocab) for r in rollouts]
    batch = RolloutBatch(rollouts)
    drawn, groups = 0, []
    for members in batch.groups():
        group = batch.select(members.tolist())
        if all(not np.any(rollout.advantage) for rollout in group):
            group, drawn = _with_advantages(group, seed=drawn), drawn + 1
        groups.append(group)
    fitting = [g for g in groups if g.logical_tokens <= most_tokens and g.trained_tokens]
    if not fitting:
        raise ConfigError(
            f"no group of {file} has at most {most_tokens} tokens; raise --most-tokens."
        )
    # Both sides with rows as long as memory allows.
    policy = stepper.configured(sharing="tree", memory_budget=stepper.budget_bytes)
    alone = stepper.configured(**DENSE, memory_budget=stepper.budget_bytes)
    case = f"{label} {stepper.mode} {file.name}"
    dense_ms = shared_ms = dense_flops = shared_flops = 0.0
    used = 0
    for group in fitting:
        if deadline.over(f"group {used} of {file.name}"):
            break
        # A kernel may be compiled at the first lengths of a kind: the first time does not count.
        stepper.step(alone, group)
        stepper.step(policy, group)
        dense, shared = stepper.planned(alone, group), stepper.planned(policy, group)
        for _ in range(REPEATS):
            stepper.repeat(alone, group, repeats=1, into=dense)
            stepper.repeat(policy, group, repeats=1, into=shared)
        plan = shared.plan
        assert plan.shape is not None
        flops = plan.dense.step_flops(plan.shape), plan.shared.step_flops(plan.shape)
        # As they come: whatever ends the bench, what was measured is kept.
        alone_case = f"{case}, group {used}"
        yield cell_row("tree", alone_case, "dense step", dense.typical_ms, "ms")
        yield cell_row("tree", alone_case, "shared step", shared.typical_ms, "ms")
        share = dense.typical_ms / shared.typical_ms / (flops[0] / flops[1])
        yield cell_row("tree", alone_case, "share of bound", share, "1", bound=flops[0] / flops[1])
        dense_ms += dense.typical_ms
        shared_ms += shared.typical_ms
        dense_flops += flops[0]
        shared_flops += flops[1]
        used += 1
    if not used:
        return
    bound = dense_flops / shared_flops
    note = f"{used} of {len(groups)} groups, each a batch; at most {most_tokens} tokens a group"
    if drawn:
        note += f"; advantages of {drawn} groups were all 0, and drawn at random"
    yield cell_row("tree", case, "dense step, sum", dense_ms, "ms", note=note)
    yield cell_row("tree", case, "shared step, sum", shared_ms, "ms", note=note)
    ratio = dense_ms / shared_ms
    beside = {"baseline": "dense", "baseline_leaves_out": True, "bound": bound}
    yield cell_row("tree", case, "speed-up", ratio, "x", note=note, **beside)
    yield cell_row("tree", case, "share of bound", ratio / bound, "1", bound=bound, note=note)


def _with_advantages(group: RolloutBatch, *, seed: int) -> RolloutBatch:
    """The same rollouts with random advantages, one each."""
    rng = np.random.default_rng(seed)
    return RolloutBatch(replace(rollout, advantage=float(rng.normal())) for rollout in group)
