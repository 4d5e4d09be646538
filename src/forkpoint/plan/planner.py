"""The planner: builds the allowed combinations of sharing and boundary, prices them, and takes the
cheapest."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

from forkpoint.config import AUTO, Config
from forkpoint.errors import PlanError
from forkpoint.plan.builder import (
    BOUNDARIES,
    MOVING_MUST_SAVE,
    SHARINGS,
    SIMPLER_IS_WORTH,
    BudgetError,
    Builder,
    Combination,
    cost_with_preference,
    least_memory,
)
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.longest import LongestSearch, responses_of
from forkpoint.plan.plan import Candidate, Plan
from forkpoint.plan.predict import plan_cost
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.meters import NOISE, meter_of
from forkpoint.plan.routing import RouterDemand
from forkpoint.plan.shared_prompts import PlannedPrompt
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray
from forkpoint.units import format_bytes

# NOISE of measured costs. In 243 measured batches (rows of `defaults`), the chosen plan is more
# than 1% slower than dense 0 times with 3%, once with 2%, 4 times with 1% and 5 times with 0.5%.
# The mean loss to the fastest plan is 0.08%, 0.10%, 0.16% and 0.21%.
MEASURED_NOISE = 0.03
# A plan that shares must also cost less than dense on a host that takes this many times as long as
# measured. Cores of rented machines run at two speeds, 1.8 times apart, and change within seconds.
# In 107 measured batches of Qwen3-0.6B and 1.7B, the chosen plan is slower than dense by more than
# the spread of repeats twice with factors up to 1.3, once with 1.4 and 1.5, and never from 1.6 on.
# It misses the fastest plan by more than 3% and the spread once with 1.4 to 1.8, else twice.
SLOW_HOST = 1.6
# A plan that does not is still chosen if its two ratios of cost to dense, as measured and on the
# slow host, have a product of at most this. For example, it saves 15% as measured and nothing on
# the slow host, or it saves 22% and costs 9% more there.
SAVES_MORE = 0.85
NEEDS_FAST_HOST = f"costs as much as dense if the host is slower by a factor of {SLOW_HOST}"
# Plans within a budget that cost at most this many times as much as the cheapest are made again
# with microbatches so short that all activations and logits are kept. By calibrations of Qwen3-1.7B
# on an H200, steps above 3 s are then at most 0.4% longer in the mean than after a search of all
# lengths (benchmarks/history/log.md, 2026-12-01).
NEAR_THE_FASTEST = 1.05


def make_plan(
    batch: RolloutBatch,
    shape: ModelShape | None = None,
    config: Config | None = None,
    *,
    coupling: IntArray | None = None,
    calibration: Calibration | None = None,
    capabilities: Capabilities | None = None,
    budget_bytes: int | None = None,
    uses_temperature: bool = True,
    routers: RouterDemand | None = None,
    prompts: tuple[PlannedPrompt, ...] | None = None,
    runs: IntArray | None = None,
) -> Plan:
    """Plan a batch.

    Args:
        batch: the rollouts.
        shape: sizes of the model, for FLOPs and bytes. Without it plans are priced in tokens.
        config: allowed options. `auto` compares every combination, with dense.
        coupling: int64 [N], equal for rollouts that the loss couples. If their trained tokens are
            in several microbatches, the program begins with a pass of scores. None means that the
            loss couples no rollouts.
        calibration: measurements of this model on the device that it will run on. With it plans are
            priced in milliseconds instead of FLOPs. None reads the file that the configuration
            names, if any.
        capabilities: capabilities of the model's host (`Host.capabilities`). None means all, except
            that forwards of a model that checkpoints itself do not end inside the last block.
        budget_bytes: limit of the predicted peak. None takes the bytes of the configuration, if
            any. If its memory_budget is "auto" and no plan fits, the plan has about the least
            predicted peak.
        uses_temperature: whether the head's outputs depend on temperatures, as log-probs do and a
            critic's values do not. An edge then has an entry for each temperature at which it is
            trained.
        routers: demands of router statistics; None without a router loss or counts of experts.
        prompts: prompts of this rank, perhaps none, if ranks exchange prompts in the step. The
            configuration must allow it (`plan.shared_prompts.cannot_exchange`). None if ranks
            exchange no prompts.
        runs: int64 [N], number of edges of each rollout that run, from its first
            (`plan.runs.run_lengths`). None means all.

    Raises:
        PlanError: no combination fits the limits (the message has the reason of the one that needs
            the least memory), or there is a budget in bytes or a calibration without a shape.
        ConfigError: the calibration was measured for another model shape.
    """
    config = config or Config()
    if calibration is None and config.calibration not in (None, AUTO):
        calibration = Calibration.load(Path(config.calibration or ""))
    if capabilities is None:
        capabilities = Capabilities(
            leaves_early=shape is None or shape.leaves_early,
            deals_segments=shape is None or not shape.recurrent_layers,
        )
    builder = Builder(
        batch,
        shape,
        config,
        coupling,
        calibration,
        capabilities,
        budget_bytes,
        uses_temperature,
        routers,
        prompts,
        runs,
    )
    sharings = SHARINGS if config.sharing == "auto" else (config.sharing,)
    boundaries = BOUNDARIES if config.boundary == "auto" else (config.boundary,)
    if prompts:
        sharings, boundaries = ("tree" if config.sharing == AUTO else config.sharing,), ("mixed",)
    combinations = list(product(sharings, boundaries))
    plans, errors = _built(builder, combinations)
    if not any(plan.fits for plan in plans) and builder.tries_few:
        builder = builder.with_every_length()
        plans, errors = _built(builder, combinations)
    else:
        most = min((p.cost for p in plans if p.fits), default=0.0) * NEAR_THE_FASTEST
        plans = [builder.with_all_kept(p) if p.cost <= most else p for p in plans]
    if not plans:
        raise _refusal(errors, builder)
    fitting = [plan for plan in plans if plan.fits]
    need_fast_host: set[Combination] = set()
    if fitting:
        chosen, fitting, need_fast_host = _chosen_for_any_host(fitting, calibration, builder)
        plan = builder.with_all_kept(chosen)  # dense may have cost more than NEAR_THE_FASTEST
        fitting = [plan if p is chosen else p for p in fitting]
    else:
        plan = least_memory(plans)
    dense = min((p.cost for p in fitting if p.sharing == "none"), default=None)
    compared = {_combination(each): each for each in (*plans, *fitting)}
    candidates = [
        Candidate(*pair, None, str(errors[pair]))
        if pair in errors
        else Candidate(*pair, compared[pair].cost, _refused(compared[pair], plan, need_fast_host))
        for pair in combinations
    ]
    budget, responses, find_longest = builder.budget_bytes, responses_of(batch), None
    if shape is not None and budget is not None and responses:
        find_longest = LongestSearch(responses, shape, config, capabilities, calibration, budget)
    return replace(
        plan,
        candidates=tuple(candidates),
        reason=_reason(plan, dense, config, candidates),
        find_longest=find_longest,
    )


def _built(
    builder: Builder, combinations: Iterable[Combination]
) -> tuple[list[Plan], dict[Combination, PlanError]]:
    """The plans of possible combinations, and the errors of impossible ones."""
    plans, errors = list[Plan](), dict[Combination, PlanError]()
    for combination in combinations:
        try:
            plans.append(builder.build(*combination))
        except PlanError as error:
            errors[combination] = error
    return plans, errors


def _refusal(errors: Mapping[Combination, PlanError], builder: Builder) -> PlanError:
    """The error if no combination is possible: that of the one that needs the least memory. Errors
    about limits other than the budget do not say how much is needed."""
    needed = {c: e.needed_bytes for c, e in errors.items() if isinstance(e, BudgetError)}
    best = min(errors, key=lambda combination: needed.get(combination, math.inf))
    error = errors[best]
    message = f"no plan fits this batch: {' + '.join(best)}: {error}"
    if isinstance(error, BudgetError):
        enough = builder.enough_bytes(*best, error.needed_bytes)
        message += f"; raise it to at least {enough}, or {error.remedy}."
    return PlanError(message)


def noise_of(plan: Plan) -> float:
    """Relative difference of costs up to which dense is chosen instead of a plan that shares."""
    return NOISE if plan.predicted_ms is None else MEASURED_NOISE


def _combination(plan: Plan) -> Combination:
    return plan.sharing, plan.boundary


def _chosen_for_any_host(
    plans: list[Plan], calibration: Calibration | None, builder: Builder
) -> tuple[Plan, list[Plan], set[Combination]]:
    """The chosen plan, the plans, and sharings and boundaries of those that are passed over because
    they do not cost less than dense if the host is slower than measured by SLOW_HOST, and save too
    little as measured (SAVES_MORE).

    Before that, such a plan is replaced by one without short segments if that costs less than dense
    on both.
    """
    plan, needing = _chosen(plans), set[Combination]()
    dense = min((p for p in plans if p.sharing == "none"), key=lambda p: p.cost, default=None)
    if calibration is None or dense is None or plan.sharing == "none":
        return plan, plans, needing
    slow = calibration.with_slower_host(SLOW_HOST)

    def cost(plan: Plan) -> float:
        return plan_cost(plan, meter_of(plan, slow))

    most, most_if_slow = (each / (1 + MEASURED_NOISE) for each in (dense.cost, cost(dense)))
    while plan.sharing != "none" and plan.cost <= most and cost(plan) > most_if_slow:
        fewer = builder.without_short_segments(*_combination(plan))
        if fewer and fewer.fits and fewer.cost <= most and cost(fewer) <= most_if_slow:
            plans = [fewer if p is plan else p for p in plans]
        elif plan.cost / dense.cost * cost(plan) / cost(dense) <= SAVES_MORE:
            break
        else:
            needing.add(_combination(plan))
        plan = _chosen([p for p in plans if _combination(p) not in needing])
    return plan, plans, needing


def _refused(plan: Plan, chosen: Plan, need_fast_host: set[Combination]) -> str | None:
    """Reason why a plan is impossible, or was not chosen although it costs less; None if it does
    not cost less."""
    if not plan.fits:
        peak, budget = plan.predicted_peak_bytes or 0, plan.memory_budget_bytes or 0
        return (
            f"it is predicted to need {format_bytes(peak)} and the budget is {format_bytes(budget)}"
        )
    if plan.cost >= chosen.cost:
        return None
    noise = noise_of(chosen) if chosen.sharing == "none" else SIMPLER_IS_WORTH
    if _combination(plan) in need_fast_host:
        return NEEDS_FAST_HOST
    if chosen.cost <= plan.cost * (1 + noise):
        return f"cheaper by less than {noise:.1%}; the simpler plan is chosen"
    most = (1 + noise) * (1 + MOVING_MUST_SAVE) - 1
    return f"cheaper by less than {most:.1%}; moves data to host memory"


def _chosen(plans: list[Plan]) -> Plan:
    """The simplest of the cheapest plans that share, if they cost less than dense by more than
    noise; otherwise dense."""
    dense = [plan for plan in plans if plan.sharing == "none"]
    most = min((plan.cost for plan in dense), default=math.inf)
    shared = (plan for plan in plans if plan.sharing != "none")
    cheaper = [p for p in shared if cost_with_preference(p) * (1 + noise_of(p)) < most]
    compared = cheaper or dense
    least = min(map(cost_with_preference, compared))
    return next(p for p in compared if cost_with_preference(p) <= least * (1 + SIMPLER_IS_WORTH))


def _reason(
    plan: Plan, dense: float | None, config: Config, candidates: Iterable[Candidate]
) -> str:
    if not plan.fits:
        return "no plan fits the budget; needs about the least memory"
    if config.sharing == "none" or "auto" not in (config.sharing, config.boundary):
        return "as asked"
    if dense is None:
        return "the cheapest of the plans that fit"
    if plan.sharing == "none":
        if any(candidate.refused == NEEDS_FAST_HOST for candidate in candidates):
            return "plans that share cost less than dense only on a fast host"
        return f"no plan that shares costs {noise_of(plan):.1%} less than dense"
    return f"predicted {dense / plan.cost:.2f}x faster than dense"
