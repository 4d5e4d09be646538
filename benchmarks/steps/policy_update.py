"""The update of a policy and the log-prob pass before it, beside dense."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from benchmarks.rows import ResultRow
from benchmarks.runner import Deadline
from benchmarks.shapes import SCALE_TINY, make_group
from benchmarks.steps.cells import cell_row, cell_rows
from benchmarks.steps.options import Steps
from benchmarks.steps.stepper import (
    DENSE,
    DENSE_ROW_TOKENS,
    Dense,
    Stepper,
    best_dense,
    repeated,
)
from forkpoint.apps.cli.options import Flag
from forkpoint.rollouts.batch import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate(Steps):
    """Time the update and the log-prob pass of a group in Qwen3's shapes.

    Attributes:
        shape: Whose sizes the model has. qwen3-8b gets 32 responses to 8,192 tokens, qwen3-4b four
            in contexts of 4,096 and 8,192.
        all_rollouts: Run all rollouts densely, in place of scaling eight of them.
    """

    NAME: ClassVar[str] = "policy-update"

    shape: Literal["qwen3-8b", "qwen3-4b"] = "qwen3-8b"
    all_rollouts: Flag = False

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        return policy_update(
            self.stepper(self.shape),
            deadline,
            name=self.shape,
            tiny=self.tiny,
            all_rollouts=self.all_rollouts,
        )


def policy_update(
    stepper: Stepper,
    deadline: Deadline,
    *,
    name: str,
    tiny: bool = False,
    all_rollouts: bool = False,
) -> Iterator[ResultRow]:
    """Update and log-prob pass of a group: 32 responses to 8,192 tokens, or 4 to 4,096 and 8,192.

    `name` is the model's shape: qwen3-4b gets the second kind.
    """
    scale = SCALE_TINY if tiny else 1
    rng = np.random.default_rng(42)
    ragged = [int(r) for r in rng.integers(131, 2048, 32)]
    if name == "qwen3-4b":
        # Contexts in all: the prompt is what is left of them.
        cells = [(c - 1024, [1024] * 4, f"context {c} n=4 R=1024") for c in (4096, 8192)]
    else:
        cells = [
            (8192, ragged, "P=8192 N=32 R~U(131,2048)"),
            (8192, [2048] * 32, "P=8192 N=32 R=2048"),
        ]
    for prompt, responses, label in cells:
        case = f"{name} {stepper.mode} {label}"
        if deadline.over(case):
            continue
        lengths = [max(2, r // scale) for r in responses]
        batch = make_group(prompt // scale, lengths, vocab=stepper.vocab)
        policy = stepper.configured(memory_budget=stepper.budget_bytes)
        row_tokens = DENSE_ROW_TOKENS // scale
        dense, _, some = best_dense(
            stepper,
            batch,
            repeats=1,
            sample=8,
            row_tokens=row_tokens,
            all_rollouts=all_rollouts,
        )
        shared = repeated(stepper, policy, batch)
        yield from cell_rows("policy-update", case, shared, dense)
        yield from _score_rows(stepper, case, batch, batch if all_rollouts else some, dense)


def _score_rows(
    stepper: Stepper, case: str, batch: RolloutBatch, some: RolloutBatch, dense: Dense
) -> Iterator[ResultRow]:
    """The pass for old or reference log-probs."""
    tokens = dense.timed.plan.max_microbatch_tokens
    alone = stepper.configured(**DENSE, max_microbatch_tokens=tokens)
    policy = stepper.configured(memory_budget=stepper.budget_bytes)
    for each, rollouts in ((alone, some), (policy, batch)):
        stepper.score(each, rollouts, repeats=1)
    plain = stepper.score(alone, some, repeats=2)
    shared = stepper.score(policy, batch, repeats=2)
    plan = shared.plan
    assert plan.shape is not None
    bound = plan.dense.forward_flops(plan.shape) / plan.shared.forward_flops(plan.shape)
    forward = plan.dense.forward_flops(plan.shape) / plain.plan.dense.forward_flops(plan.shape)
    whole = replace(dense, scale=forward).scaled(plain.typical_ms)
    for metric, value, unit in (
        ("shared log-probs", shared.typical_ms, "ms"),
        ("dense log-probs", whole, "ms"),
        ("log-probs speed-up", whole / shared.typical_ms, "x"),
    ):
        ratio = unit == "x"
        yield cell_row(
            "policy-update",
            case,
            metric,
            value,
            unit,
            baseline="dense" if ratio else None,
            baseline_leaves_out=True if ratio else None,
            bound=bound if ratio else None,
        )
