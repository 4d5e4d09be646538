"""Predicts a step of several ranks from the plan of each.

Ranks that gather weights for each microbatch run programs of one common shape, and each instruction
takes the time of the slowest rank. Ranks that gather weights once a step wait for each other only
at its end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forkpoint.plan import Plan
from forkpoint.plan.align import align
from forkpoint.plan.gathering import (
    RankCosts,
    apart_cost,
    costs_of_rank,
    link_cost,
    lockstep_cost,
)
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.program import Program
from forkpoint.plan.shared_prompts import (
    PlannedPrompt,
    SharedPrompt,
    exchanging,
    planned_prompts,
    prompts_of,
    shared_prompts,
)
from forkpoint.rollouts.batch import RolloutBatch


@dataclass(frozen=True)
class RanksStep:
    """A predicted step of several ranks, in the unit of the plans' prices."""

    lockstep: float
    """Cost if weights are gathered for each microbatch, so that every instruction waits for the
    slowest rank."""
    once: float
    """Cost if weights are gathered once a step, so that ranks wait only at the end."""
    mean: float
    """Mean cost of the ranks, without waiting."""


def predict_step(
    plans: Sequence[Plan | None],
    calibration: Calibration | None = None,
    prompts: Sequence[SharedPrompt] = (),
) -> RanksStep:
    """Predict the step of several ranks.

    The prediction includes computation, waiting for other ranks, and exchanges of prompts. It does
    not include other communication or copies to host memory. An idle instruction is free, because
    at least one rank runs the instruction.

    Args:
        plans: plans by rank; None for a rank without rollouts.
        calibration: the calibration of the plans, if any.
        prompts: exchanged prompts, for plans of `exchange_plans`.

    Raises:
        PlanError: there is no rank.
    """
    nothing = exchanging(Program(), (), scores=_scored(plans)) if prompts else Program()
    programs = [plan.program if plan else nothing for plan in plans]
    costs = [costs_of_rank(plan, plan, calibration) if plan else RankCosts() for plan in plans]
    both = [[f + b for f, b in zip(c.forward, c.backward, strict=True)] for c in costs]
    lockstep, once = lockstep_cost(align(programs, both), costs), apart_cost(costs)
    shape = next((plan.shape for plan in plans if plan), None)
    link = link_cost(prompts, shape, costs) if prompts else 0.0
    own = [cost.once or 0.0 for cost in costs]
    return RanksStep(lockstep + link, once + link, sum(own) / len(own))


def exchange_plans(
    batches: Sequence[RolloutBatch | None],
    plans: Sequence[Plan | None],
    make: Callable[[RolloutBatch, tuple[PlannedPrompt, ...]], Plan],
) -> tuple[list[Plan | None], tuple[SharedPrompt, ...]]:
    """Make plans of ranks that exchange common prompts. Returns the plans and the prompts.

    Without common prompts, returns `plans` and ().

    Args:
        batches: batches by rank; None for a rank without rollouts.
        plans: plans of these in which each rank runs all of its tokens.
        make: makes the plan of a rank's rollouts with its prompts.

    Raises:
        PlanError: the settings allow no such plan.
    """
    own = [
        prompts_of(batch, plan.run_lengths) if batch and plan else {}
        for batch, plan in zip(batches, plans, strict=True)
    ]
    edges = [{name: prompt.edges for name, prompt in each.items()} for each in own]
    tokens = [float(plan.computed_tokens) if plan else 0.0 for plan in plans]
    shared = shared_prompts(edges, tokens)
    if not shared:
        return list(plans), ()
    found: list[Plan | None] = []
    for rank, (batch, plan) in enumerate(zip(batches, plans, strict=True)):
        prompts = planned_prompts(shared, own[rank], rank)
        if batch and plan:
            plan = make(batch, prompts) if prompts else replace(plan, split="exchange")
        found.append(plan)
    scores = _scored(found)
    return [plan and plan.with_program(scores=scores) for plan in found], shared


def _scored(plans: Sequence[Plan | None]) -> bool:
    """Whether any rank runs a pass of scores first. With exchanged prompts, then all ranks do."""
    return any(plan is not None and plan.program.has_scores for plan in plans)
