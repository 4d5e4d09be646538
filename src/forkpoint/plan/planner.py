"""From a batch to a plan: build the combinations asked for, price them, take the cheapest."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

from forkpoint.config import AUTO, Config
from forkpoint.errors import PlanError
from forkpoint.plan.builder import (
    BOUNDARIES,
    KEEPING_IS_WORTH,
    SHARINGS,
    BudgetError,
    Builder,
    cost_with_preference,
    least_memory,
)
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.longest import LongestSearch, responses_of
from forkpoint.plan.plan import Candidate, Plan
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.meters import NOISE
from forkpoint.plan.routing import RouterDemand
from forkpoint.plan.shared_prompts import PlannedPrompt
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray
from forkpoint.units import format_bytes


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
        shape: sizes of the model, for FLOPs and bytes; without it plans are priced in tokens.
        config: what may be chosen; `auto` looks at every combination, dense among them.
        coupling: int64 [N], which rollouts a loss couples (same entry): where their trained tokens
            lie in several microbatches the program begins with a pass of scores. None couples
            nothing.
        calibration: what was measured for this model on the device that it will run on; with it
            plans are priced in milliseconds instead of FLOPs. None reads the file that the
            configuration names, if it names one.
        capabilities: what the host of the model can do (`Host.capabilities`). None: all, but that
            a model whose shape says that it checkpoints itself is not left early.
        budget_bytes: the limit of the predicted peak; None: the bytes of the configuration, if it
            names some. If its memory_budget is "auto" and nothing fits, a plan of about the least
            predicted peak is made.
        uses_temperature: whether the head's outputs depend on temperatures, as log-probs do and a
            critic's values do not. An edge then has an entry for each temperature at which it is
            trained.
        routers: demands of routers' statistics; None where there are no such statistics.
        prompts: of a step in which ranks exchange prompts, those of this rank, none of them
            too; the configuration must allow it (`plan.shared_prompts.cannot_exchange`). None
            where they do not.
        runs: int64 [N], how many edges of each rollout run, from its first: what
            `plan.runs.run_lengths` gives. None: all.

    Raises:
        PlanError: no combination fits the limits; the message has the reason of the one that needs
            the least memory. Or there is a budget in bytes or a calibration, which say nothing
            without a shape.
        ConfigError: the calibration is of another model shape.
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
    plans, candidates, errors = _built(builder, product(sharings, boundaries))
    if not plans:
        # Those that other limits than the budget refuse do not say how much would fit.
        needed = [e.needed_bytes if isinstance(e, BudgetError) else math.inf for e in errors]
        best = needed.index(min(needed))
        c, error = candidates[best], errors[best]
        raise PlanError(f"no plan fits this batch: {c.sharing} + {c.boundary}: {error}")
    fitting = [plan for plan in plans if plan.fits]
    plan = _chosen(fitting) if fitting else least_memory(plans)
    dense = min((p.cost for p in plans if p.sharing == "none"), default=None)
    candidates = [
        replace(c, refused=c.refused or _passed_over(c.cost, plan.cost)) for c in candidates
    ]
    budget, responses, find_longest = builder.budget_bytes, responses_of(batch), None
    if shape is not None and budget is not None and responses:
        find_longest = LongestSearch(responses, shape, config, capabilities, calibration, budget)
    return replace(
        plan,
        candidates=tuple(candidates),
        reason=_reason(plan, dense, config),
        find_longest=find_longest,
    )


def _built(
    builder: Builder, combinations: Iterable[tuple[str, str]]
) -> tuple[list[Plan], list[Candidate], list[PlanError]]:
    """The plans of combinations that are possible, all combinations, with why one is not, and the
    errors of those that are not."""
    plans: list[Plan] = []
    candidates: list[Candidate] = []
    errors: list[PlanError] = []
    for sharing, boundary in combinations:
        try:
            plan = builder.build(sharing, boundary)
        except PlanError as error:
            candidates.append(Candidate(sharing, boundary, None, str(error)))
            errors.append(error)
            continue
        refused = None
        if not plan.fits:
            peak, budget = plan.predicted_peak_bytes or 0, plan.memory_budget_bytes or 0
            refused = (
                f"it is predicted to need {format_bytes(peak)} and the budget is "
                f"{format_bytes(budget)}"
            )
        candidates.append(Candidate(sharing, boundary, plan.cost, refused))
        plans.append(plan)
    return plans, candidates, errors


def _passed_over(cost: float | None, chosen: float) -> str | None:
    """Why a plan was passed over that costs less than the chosen one; None if it costs no less."""
    if cost is None or cost >= chosen:
        return None
    if chosen <= cost * (1 + NOISE):
        return f"cheaper by less than {NOISE:.1%}, and the simpler is taken"
    return f"cheaper by less than {KEEPING_IS_WORTH:.0%}, and does not keep all activations"


def _chosen(plans: list[Plan]) -> Plan:
    """The simplest of those that are as cheap as any, within noise; never dearer than dense.

    As within a combination, plans that keep all activations are preferred.
    """
    dense = min((plan.cost for plan in plans if plan.sharing == "none"), default=math.inf)
    able = [plan for plan in plans if plan.cost <= dense * (1 + NOISE)]
    cheapest = min(cost_with_preference(plan) for plan in able)
    return next(plan for plan in able if cost_with_preference(plan) <= cheapest * (1 + NOISE))


def _reason(plan: Plan, dense: float | None, config: Config) -> str:
    if not plan.fits:
        return "needs about the least; nothing fits the budget"
    if config.sharing == "none" or "auto" not in (config.sharing, config.boundary):
        return "as asked"
    if dense is None:
        return "the cheapest of those looked at"
    if plan.sharing == "none":
        return "nothing that shares costs less than dense"
    if dense < plan.cost * (1 + NOISE):
        return "predicted as fast as dense"
    return f"predicted {dense / plan.cost:.2f}x faster than dense"
