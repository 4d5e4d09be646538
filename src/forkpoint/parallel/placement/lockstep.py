"""Steps of many ranks, predicted from the plan of each.

Ranks that gather weights in every forward and backward run aligned programs: each instruction takes
as long as it takes the slowest of them. Ranks whose weights stay gathered for the step wait for
each other once, at its end.
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
    """A predicted step of many ranks, in the unit of the plans' prices."""

    lockstep: float
    """Every instruction waits for the slowest rank: collectives in each forward and backward."""
    once: float
    """Ranks wait for each other at the end alone: weights gathered once a step."""
    mean: float
    """Mean of the ranks' own work."""


def predict_step(
    plans: Sequence[Plan | None],
    calibration: Calibration | None = None,
    prompts: Sequence[SharedPrompt] = (),
) -> RanksStep:
    """Predict the step of ranks that each have a plan.

    Copies to the host's memory are not counted, nor is communication but that of prompts: what is
    predicted is computation, and waiting for that of others. An idle instruction is counted as
    free, because there is always a rank that does not idle it.

    Args:
        plans: by rank; None where a rank has no rollouts.
        calibration: that the plans were priced with, if any.
        prompts: those that the ranks exchange, if the plans are of `exchange_plans`.

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
    """Plans of ranks that exchange the prompts that several of them have, and those prompts.

    Without any, the plans are those given, and there are no prompts.

    Args:
        batches: by rank; None where a rank has no rollouts.
        plans: of these, each rank running all of its tokens.
        make: makes the plan of a rank's rollouts with its prompts.

    Raises:
        PlanError: the settings have no such plan.
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
    """Whether a pass of scores comes first on any rank, and so on all that exchange prompts."""
    return any(plan is not None and plan.program.has_scores for plan in plans)
