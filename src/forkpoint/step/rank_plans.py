"""Plans of a rank beside the one for lockstep in which it runs all of its rollouts' tokens: for
weights that are gathered once a step, and for prompts that ranks exchange."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from forkpoint.config import Config
from forkpoint.engine.host import Host
from forkpoint.engine.memory import MemoryBudgets
from forkpoint.errors import PlanError
from forkpoint.parallel.agreement import Proposal
from forkpoint.plan import Plan
from forkpoint.plan.gathering import ExchangeOffer, LinkSizes, RankCosts, costs_of_rank
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.shared_prompts import (
    PlannedPrompt,
    PromptOfBatch,
    SharedPrompt,
    cannot_exchange,
    planned_prompts,
    prompts_of,
    shared_prompts,
    worth_pricing,
)
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.units import shown


class Again(Protocol):
    """Makes a rank's plan another way."""

    def __call__(
        self, budget_bytes: int | None, /, *, prompts: tuple[PlannedPrompt, ...] | None = None
    ) -> Plan: ...


@dataclass(frozen=True)
class ExchangePlans:
    """Plans of a rank for a step in which prompts are exchanged."""

    prompts: tuple[PlannedPrompt, ...]
    """Of this rank."""
    lockstep: Plan
    once: Plan | None
    """For weights that are gathered once a step."""


@dataclass(frozen=True)
class Ways:
    """Facts that a rank needs of both ways to hold weights (`Config.gather`)."""

    host: Host
    config: Config
    budgets: MemoryBudgets
    calibration: Callable[[], Calibration | None]
    """Finds the one that plans are priced with."""
    again: Again | None
    """Makes the plan within another memory budget; None where it was given."""

    def once(self, plan: Plan) -> tuple[Plan | None, str]:
        """The plan for weights that are gathered once, or None and why there is none.

        Args:
            plan: that for weights that are gathered for each microbatch.

        Whole weights count against the plan's budget, unless the configuration asks for them.
        """
        if self.config.gather == "step":
            return plan, ""
        if self.config.gather == "microbatch":
            return None, "as asked"
        group = self.host.group
        assert group is not None
        weights = group.held_bytes("step") - group.held_bytes("microbatch")
        budget, peak = plan.memory_budget_bytes, plan.predicted_peak_bytes
        if budget is None or peak is None or peak + weights <= budget:
            return plan, ""
        why_not = (
            f"whole weights ({shown(weights)} more) do not fit the memory budget of {shown(budget)}"
        )
        if self.again is None or budget <= weights:
            return None, why_not
        try:
            found = self.again(budget - weights)
        except PlanError:
            return None, why_not
        return (found, "") if found.fits else (None, why_not)

    def held(self, plan: Plan, *, scores: bool) -> tuple[RankCosts, Plan | None]:
        """Costs of a plan in both ways to hold weights, and the plan for weights gathered once."""
        group = self.host.group
        assert group is not None
        once, why_not = self.once(plan) if group.gathers else (plan, "")
        costs = costs_of_rank(plan, once, self.calibration(), scores=scores, why_not=why_not)
        return costs, once

    # Prompts
    # ------------------------------------------------------------

    def prompts(self, batch: RolloutBatch, plan: Plan) -> dict[str, PromptOfBatch]:
        """By digest, what other ranks may have as well, where this rank can exchange it.

        `plan` is one of the batch, in which this rank runs all of that.
        """
        group = self.host.group
        able = self.again is not None and group is not None and not group.ranks.shares_batches
        # Digests of prompts do not tell routes apart.
        able = able and batch.routed_experts is None
        if not able or self.config.split == "replicate" or cannot_exchange(self.config):
            return {}
        return prompts_of(batch, plan.run_lengths)

    def common(self, proposals: Sequence[Proposal]) -> tuple[SharedPrompt, ...]:
        """Prompts of several ranks that are to be priced, the same on all; none where ranks do not
        make the same call, which is refused."""
        if any(p.error is not None for p in proposals) or len({p.call for p in proposals}) > 1:
            return ()
        tokens = [sum(proposal.costs) for proposal in proposals]
        found = shared_prompts([proposal.prompts for proposal in proposals], tokens)
        asked = self.config.split == "exchange"
        return found if asked or worth_pricing(found, tokens) else ()

    def exchanged(
        self,
        shared: tuple[SharedPrompt, ...],
        own: Mapping[str, PromptOfBatch],
        plan: Plan,
        *,
        scores: bool,
    ) -> tuple[ExchangeOffer | str, ExchangePlans | None]:
        """This rank's part of a step in which prompts are exchanged, or why it has none.

        Args:
            shared: all of the step.
            own: this rank's.
            plan: of this rank, in which it runs them itself.
            scores: whether a pass of scores comes first on all ranks.
        """
        group = self.host.group
        assert group is not None
        if self.again is None:
            return "its plan was given", None
        prompts = planned_prompts(shared, own, group.ranks.index)
        ways = self
        if prompts:
            ways = replace(self, again=partial(self.again, prompts=prompts))
            try:
                plan = ways.again(self.budgets.of(self.host, self.config))  # type: ignore[misc]
            except PlanError as error:
                return str(error), None
            if not plan.fits:
                return "their prefix caches do not fit the memory budget", None
        held, once = ways.held(plan, scores=False)
        scores = scores or any(each.program.has_scores for each in (plan, once or plan))

        def exchanging(plan: Plan) -> Plan:
            return replace(plan, split="exchange").with_program(scores=scores)

        lockstep = exchanging(plan)
        plans = ExchangePlans(prompts, lockstep, None if once is None else exchanging(once))
        calibration = self.calibration()
        costs = costs_of_rank(lockstep, plans.once, calibration, why_not=held.why_not)
        return ExchangeOffer(
            plans.lockstep.program,
            tuple(float(m.tokens) for m in plan.microbatches),
            costs,
            LinkSizes.of(plan.shape),
        ), plans
