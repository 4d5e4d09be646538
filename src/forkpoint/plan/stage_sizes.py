"""Choice of the size of microbatches on pipeline stages, by the predicted time of a step.

Short microbatches fill a pipeline sooner, and long ones fill devices better. Under a memory budget,
kept activations avoid repeated forwards, but leave room for fewer microbatches in flight. So each
rank plans its batch in several sizes, and data ranks exchange the programs and prices of all. Each
size is ordered on all stages within their memory (`plan.stages`), and the fastest that fits is
chosen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from forkpoint.config import AUTO, Config
from forkpoint.errors import PlanError
from forkpoint.plan.align import align
from forkpoint.plan.builder import DEFAULT_MICROBATCH_TOKENS, SIMPLER_IS_WORTH
from forkpoint.plan.pipeline import Floats, StageSchedule, StageWork, forwards_time, order_stages
from forkpoint.plan.plan import Plan
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.meters import meter_of
from forkpoint.plan.program import Program
from forkpoint.plan.stages import (
    Stage,
    StagePrices,
    schedule_stages,
    score_costs,
    stage_prices,
    stage_work,
)
from forkpoint.units import exactly

HALVINGS = 4
"""Largest number of times that the length of microbatches is halved."""
SHORT_TOKENS = 1000
ENOUGH = 8
"""Shorter microbatches are tried only if there are fewer than this number for each stage."""

Planner = Callable[[Config, int | None], Plan]
"""Makes the plan of a batch from a configuration and a memory budget in bytes (None means no
limit), or raises PlanError."""


def plans_of_sizes(
    config: Config, budget_bytes: int | None, stages: int, make: Planner
) -> tuple[Plan, ...]:
    """Plans of a batch for pipeline stages, in several sizes. The plan for a single device comes
    first.

    Unless the configuration limits `max_microbatch_tokens`, other plans have microbatches of a half
    of the length, a quarter, and so on, while there are few microbatches. Under a budget each
    length is planned twice: for the budget, and for the budget times the number of stages, because
    a stage holds a part of the layers.

    Args:
        config: allowed options.
        budget_bytes: budget of each stage; None means no limit.
        make: the planner of this batch.

    Raises:
        PlanError: the first plan cannot be made.
    """
    wide_bytes = None if budget_bytes is None else budget_bytes * stages
    first = _planned(make, config, budget_bytes)
    if first is None and wide_bytes is not None:
        first = _planned(make, config, wide_bytes)
    first = first or make(config, budget_bytes)  # which raises
    lengths = [config.max_microbatch_tokens or first.max_microbatch_tokens]
    if config.max_microbatch_tokens is None:
        longest = max((microbatch.tokens for microbatch in first.microbatches), default=1)
        halved = min(longest, DEFAULT_MICROBATCH_TOKENS)
        lengths += [max(1, halved >> times) for times in range(1, HALVINGS + 1)]
    shared = replace(config, sharing=first.sharing, boundary=first.boundary)
    if config.boundary == AUTO and first.boundary == "within":
        shared = replace(shared, boundary="mixed")  # which cuts longer rollouts
    chosen, found = AUTO in (config.sharing, config.boundary), [first]
    for length in lengths:
        if length < SHORT_TOKENS and len(found[-1].microbatches) >= ENOUGH * stages:
            break
        sized, wide = replace(shared, max_microbatch_tokens=length), None
        if wide_bytes is not None:
            wide = _planned(make, sized, wide_bytes, chosen=chosen)
            found.append(wide or found[-1])
        if length == first.max_microbatch_tokens:
            continue
        fits = wide is not None and (wide.predicted_peak_bytes or 0) <= (budget_bytes or 0)
        made = wide if fits else _planned(make, sized, budget_bytes, chosen=chosen)
        found.append(made or found[-1])
    return tuple(found)


def _planned(
    make: Planner, config: Config, budget_bytes: int | None, *, chosen: bool = False
) -> Plan | None:
    """`chosen`: whether `plans_of_sizes` has chosen the sharing of the configuration."""
    try:
        plan = make(config, budget_bytes)
    except PlanError:
        return None
    return replace(plan, reason="with microbatches for the stages") if chosen else plan


# The choice
# ------------------------------------------------------------


class SizedOffer(NamedTuple):
    """One rank's part of a step with microbatches of one size."""

    program: Program
    tokens: tuple[float, ...]
    """Number of tokens of each microbatch."""
    prices: StagePrices


def offers_of(
    plans: Sequence[Plan],
    calibration: Calibration | None = None,
    programs: Sequence[Program] | None = None,
) -> tuple[SizedOffer, ...]:
    """Offers of these plans with their prices. Equal objects among the plans have one offer.

    Args:
        calibration: measured prices, the same on all ranks; None counts FLOPs.
        programs: programs of the plans; None takes `Plan.program`.
    """
    found: dict[int, SizedOffer] = {}
    for plan, program in zip(plans, programs or [p.program for p in plans], strict=True):
        if id(plan) not in found:
            tokens = tuple(float(microbatch.tokens) for microbatch in plan.microbatches)
            prices = stage_prices(plan, meter_of(plan, calibration))
            found[id(plan)] = SizedOffer(program, tokens, prices)
    return tuple(found[id(plan)] for plan in plans)


@dataclass(frozen=True, eq=False)
class StagedStep:
    """A step of all data ranks on pipeline stages, with its predictions."""

    size: int
    """Index of the chosen offer. For a rank with fewer offers, its last one is chosen."""
    programs: tuple[Program, ...]
    """Aligned programs by data rank."""
    work: StageWork
    schedule: StageSchedule
    scores: Floats
    """[S, N]: cost of each forward of the pass of scores at each stage. N is 0 without such a
    pass."""
    budget_bytes: int | None
    """Memory budget of each stage; None means no limit."""

    @property
    def time(self) -> float:
        """Predicted cost of the step, in the unit of the prices."""
        return forwards_time(self.scores) + self.schedule.time

    @property
    def peak_bytes(self) -> float:
        """Largest predicted peak of any stage, in bytes."""
        return max(self.schedule.peak_bytes)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each stage, the time in which it runs something."""
        scores = self.scores.sum(1).tolist()
        return tuple(a + b for a, b in zip(scores, self.schedule.busy, strict=True))

    def predicted(self, plan: Plan) -> Plan:
        """The chosen plan, with its predictions on the stages."""
        return replace(
            plan,
            pipeline=self.schedule,
            predicted_peak_bytes=round(self.peak_bytes),
            memory_budget_bytes=self.budget_bytes,
        )

    @property
    def fits(self) -> bool:
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes


def choose_size(
    offers: Sequence[Sequence[SizedOffer]],
    stages: Sequence[Stage],
    budget_bytes: int | None = None,
    *,
    strict: bool = False,
) -> StagedStep:
    """Choose the fastest step that fits the memory of each stage.

    Of steps that are equally fast within 1%, the first is chosen. If none fits, the one with the
    least memory is chosen.

    Args:
        offers: by data rank, of one plan or of several sizes (`plans_of_sizes`).
        budget_bytes: budget of each stage; None means no limit.
        strict: whether to raise PlanError if no step fits.

    The result depends only on the arguments, so ranks with equal arguments agree.

    Raises:
        PlanError: `strict`, and no step fits.
    """
    sizes = range(max(map(len, offers)))
    taken = {size: tuple(own[min(size, len(own) - 1)] for own in offers) for size in sizes}
    # Sizes with the same plans on all ranks are tried once.
    distinct = {tuple(map(id, taken[size])): size for size in reversed(sizes)}
    every, most = list[StagedStep](), np.inf
    for size in sorted(distinct.values()):
        step = _ordered(size, taken[size], stages, budget_bytes, most)
        if step is not None:
            every.append(step)
            most = min(most, step.time * (1 + SIMPLER_IS_WORTH)) if step.fits else most
    fitting = [step for step in every if step.fits]
    if fitting:
        found = next(step for step in fitting if step.time <= most)
    else:
        found = min(every, key=lambda step: step.peak_bytes)
    if strict and not fitting:
        raise PlanError(
            f"a stage of the pipeline is predicted to need {exactly(round(found.peak_bytes))}, and "
            f"memory_budget is {exactly(budget_bytes or 0)}. Raise the budget, lower "
            "max_microbatch_tokens, or take fewer rollouts at a time."
        )
    return replace(found, schedule=schedule_stages(found.work, budget_bytes))


def _ordered(
    size: int,
    offers: Sequence[SizedOffer],
    stages: Sequence[Stage],
    budget_bytes: int | None,
    most: float,
) -> StagedStep | None:
    """One size on all stages, in the fastest order within the memory; None if each order takes
    longer than `most`."""
    programs = align([o.program for o in offers], [o.tokens for o in offers])
    prices = [offer.prices for offer in offers]
    work = stage_work(programs, prices, stages)
    scores = score_costs(programs, prices, stages)
    if forwards_time(scores) + work.least_time > most:
        return None
    schedule = order_stages(work, np.inf if budget_bytes is None else budget_bytes)
    return StagedStep(size, programs, work, schedule, scores, budget_bytes)
