"""One group's step beside dense over splits of its tokens and counts of rollouts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from benchmarks.rows import ResultRow
from benchmarks.runner import Deadline
from benchmarks.shapes import SCALE_TINY, make_group
from benchmarks.steps.cells import cell_rows, out_of_memory, peak_prediction
from benchmarks.steps.options import Split, Steps
from benchmarks.steps.stepper import (
    DENSE_ROW_TOKENS,
    Dense,
    Stepper,
    best_dense,
    repeated,
    repeats_for,
)
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import RolloutBatch

SPLITS = ((2048, 10_240), (6144, 6144), (8192, 4096), (10_240, 2048))
COUNTS = (4, 8, 16, 32)
# Where sharing gains least: auto must not lose there.
SMALL = ((256, 2048, 2), (1024, 1024, 2), (2048, 10_240, 2), (256, 256, 8))


@dataclass(frozen=True, kw_only=True)
class StepGrid(Steps):
    """Time one group's step of Llama3-8B's shape: four splits of 12,288 tokens, 4 to 32 rollouts.

    The planner chooses how each cell runs. Dense is compiled as well, with its best row size. Then
    come cells where sharing gains least.

    Attributes:
        counts: How many rollouts a prompt has; several may be named.
        splits: Prompt and response, of which several may be named; small are the cells where
            sharing gains least. By default all.
    """

    NAME: ClassVar[str] = "step-grid"

    counts: tuple[Literal[2, 4, 8, 16, 32], ...] = (4, 8, 16, 32)
    splits: tuple[Split | Literal["small"], ...] = ()

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        return step_grid(
            self.stepper("llama3-8b"),
            deadline,
            tiny=self.tiny,
            counts=self.counts,
            splits=self.splits,
        )


def step_grid(
    stepper: Stepper,
    deadline: Deadline,
    *,
    tiny: bool = False,
    counts: tuple[int, ...] = COUNTS,
    splits: tuple[str, ...] = (),
) -> Iterator[ResultRow]:
    """The grid of splits and counts, by the planner's choice, and where sharing gains least.

    One dense baseline a split; small cells alternate dense and shared. `splits` are names of
    splits, as 2048/10240, and "small"; without any, all.
    """
    scale = SCALE_TINY if tiny else 1
    cells = [(p, r, n) for p, r in chosen_splits(splits) for n in counts]
    small = not splits or "small" in splits
    cells += [cell for cell in SMALL if small and cell not in cells]
    baselines: dict[tuple[int, int], tuple[Dense, Policy, RolloutBatch]] = {}
    for prompt, response, count in cells:
        p, r = max(2, prompt // scale), max(2, response // scale)
        case = f"{stepper.mode} {prompt}/{response} N={count}"
        if deadline.over(case):
            continue
        batch = make_group(p, [r] * count, vocab=stepper.vocab)
        policy = stepper.configured(memory_budget=stepper.budget_bytes)
        try:
            fresh = count <= 4 or (p, r) not in baselines
            if fresh:
                row_tokens = DENSE_ROW_TOKENS // scale
                baselines[p, r] = best_dense(stepper, batch, repeats=1, row_tokens=row_tokens)
            dense, dense_policy, some = baselines[p, r]
            shared = repeated(stepper, policy, batch)
            if fresh:
                # Both again, in turn, so that neither has the warmer device.
                for _ in range(repeats_for(dense.timed.typical_ms + shared.typical_ms, most=3)):
                    stepper.repeat(dense_policy, some, repeats=1, into=dense.timed)
                    stepper.repeat(policy, batch, repeats=1, into=shared)
            # What was measured of four rollouts stands for as many as the cell has.
            dense = replace(dense, scale=count / len(some))
        except torch.OutOfMemoryError as error:
            yield out_of_memory("step-grid", case, error)
            continue
        yield from cell_rows("step-grid", case, shared, dense)
        yield from peak_prediction("step-grid", case, stepper, shared)


def chosen_splits(names: tuple[str, ...]) -> list[tuple[int, int]]:
    """The grid's splits of these names, as 2048/10240; all without a name."""
    return [(p, r) for p, r in SPLITS if not names or f"{p}/{r}" in names]
