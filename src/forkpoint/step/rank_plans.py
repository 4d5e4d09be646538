"""Plans of a rank beside the one for lockstep: for weights that are gathered once a step, and for
prompts that ranks exchange."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forkpoint.config import Config
from forkpoint.engine.distributed import holder_of
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
from forkpoint.step.plan import plan_within
from forkpoint.step.request import LocalStep, StepPolicy
from forkpoint.units import format_bytes


@dataclass(frozen=True)
class ExchangePlans:
    """Plans of a rank for a step in which prompts are exchanged."""

    prompts: tuple[PlannedPrompt, ...]
    """Of this rank."""
    lockstep: Plan
    once: Plan | None
    """For weights that are gathered once a step."""


@dataclass(frozen=True, eq=False)
class RankPlanOptions:
    """Plans of this rank for both ways to hold weights (`Config.gather`), and for exchanges."""

    policy: StepPolicy
    local: LocalStep
    """The step, with the plan in which this rank runs all of its rollouts' tokens."""
    prompts: tuple[PlannedPrompt, ...] | None = None
    """Prompts that the plans exchange; None: none."""

    @property
    def config(self) -> Config:
        return self.policy.config

    @property
    def can_replan(self) -> bool:
        """Whether the plan may be replaced by another; one of the caller's may not."""
        return self.local.request.plan is None

    def replan(self, budget_bytes: int | None) -> Plan:
        """The plan within another memory budget."""
        local, prompts = self.local, self.prompts
        demand = local.router_demand
        return plan_within(
            self.policy, local.batch, local.loss, budget_bytes, demand, prompts=prompts
        )

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
        group = holder_of(self.policy.host.group)
        weights = group.held_bytes("step") - group.held_bytes("microbatch")
        budget, peak = plan.memory_budget_bytes, plan.predicted_peak_bytes
        if budget is None or peak is None or peak + weights <= budget:
            return plan, ""
        why_not = (
            f"whole weights ({format_bytes(weights)} more) do not fit the memory budget of "
            f"{format_bytes(budget)}"
        )
        if not self.can_replan or budget <= weights:
            return None, why_not
        try:
            found = self.replan(budget - weights)
        except PlanError:
            return None, why_not
        return (found, "") if found.fits else (None, why_not)

    def held(self, plan: Plan, *, scores: bool) -> tuple[RankCosts, Plan | None]:
        """Costs of a plan in both ways to hold weights, and the plan for weights gathered once."""
        gathers = self.policy.host.topology.gathers
        once, why_not = self.once(plan) if gathers else (plan, "")
        costs = costs_of_rank(plan, once, self._calibration(), scores=scores, why_not=why_not)
        return costs, once

    def _calibration(self) -> Calibration | None:
        return self.policy.model_state.calibration(self.policy.host, self.config)

    # Prompts
    # ------------------------------------------------------------

    def prompts_of_rank(self) -> dict[str, PromptOfBatch]:
        """By digest, the prompts of this rank that it can exchange, if other ranks have them."""
        local = self.local
        able = local.request.exchanges and self.can_replan
        # Digests of prompts do not tell routes apart.
        able = able and local.batch.routed_experts is None
        if not able or self.policy.host.topology.shares_batches:
            return {}
        if self.config.split == "replicate" or cannot_exchange(self.config):
            return {}
        return prompts_of(local.batch, local.plan.run_lengths)

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
        index: int,
        *,
        scores: bool,
    ) -> tuple[ExchangeOffer | str, ExchangePlans | None]:
        """This rank's part of a step in which prompts are exchanged, or why it has none.

        Args:
            shared: all of the step.
            own: this rank's.
            index: this rank's.
            scores: whether a pass of scores comes first on all ranks.
        """
        if not self.can_replan:
            return "its plan was given", None
        options, plan = self, self.local.plan
        prompts = planned_prompts(shared, own, index)
        if prompts:
            options = replace(self, prompts=prompts)
            budgets = self.policy.model_state.budgets
            try:
                plan = options.replan(budgets.of(self.policy.host, self.config))
            except PlanError as error:
                return str(error), None
            if not plan.fits:
                return "their prefix caches do not fit the memory budget", None
        held, once = options.held(plan, scores=False)
        scores = scores or any(each.program.has_scores for each in (plan, once or plan))

        def exchanging(plan: Plan) -> Plan:
            return replace(plan, split="exchange").with_program(scores=scores)

        lockstep = exchanging(plan)
        plans = ExchangePlans(prompts, lockstep, None if once is None else exchanging(once))
        calibration = self._calibration()
        costs = costs_of_rank(lockstep, plans.once, calibration, why_not=held.why_not)
        return ExchangeOffer(
            plans.lockstep.program,
            tuple(float(m.tokens) for m in plan.microbatches),
            costs,
            LinkSizes.of(plan.shape),
        ), plans
