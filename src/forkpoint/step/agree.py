"""The second stage of a step: ranks agree on it by one or a few exchanges on CPUs.

A rank proposes its plan, with costs for both values of `Config.gather`. If ranks have common
prompts, each rank plans again for their exchange.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from forkpoint.engine.distributed import Distributed
from forkpoint.engine.prompt_exchange import PromptExchange
from forkpoint.errors import ForkpointError, PlanError
from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.refusals import has_trainable
from forkpoint.parallel.agreement import (
    Agreement,
    GatherOption,
    Held,
    Proposal,
    agreed,
    common_calibration,
    coupled,
    group_digests,
    least_budget,
)
from forkpoint.parallel.copies import contents_of
from forkpoint.parallel.step import RankStep
from forkpoint.plan import Plan
from forkpoint.plan.gathering import Offer, RankCosts, costs_of_rank
from forkpoint.plan.program import Program
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
from forkpoint.plan.stage_sizes import offers_of
from forkpoint.plan.stages import stage_plan
from forkpoint.rollouts.media import MediumOutline
from forkpoint.step.plan import check_and_plan, plan_within
from forkpoint.step.request import AgreedStep, LocalStep, StepPolicy
from forkpoint.step.self_check import sample_of
from forkpoint.units import format_bytes


@dataclass(frozen=True)
class RankPlans:
    """This rank's plans for one set of exchanged prompts."""

    lockstep: Plan
    """The plan if weights are gathered for each microbatch."""
    once: Plan | None
    """The plan if weights are gathered once a step; None if there is none."""
    costs: RankCosts
    prompts: tuple[PlannedPrompt, ...] = ()
    """Exchanged prompts of this rank."""


def agree(policy: StepPolicy, local: LocalStep) -> AgreedStep:
    """Agree on a step with the other ranks. In a single process, the local plan is used.

    Collective. With several ranks this runs within `run_on_ranks`, which reports errors to the
    other ranks. Raises RankError if another rank cannot run the step.
    """
    group = policy.host.group
    if not group.ranks.is_alone:
        return _agree_with_others(policy, group, local)
    plan = local.plan
    return AgreedStep(
        local=local,
        plan=plan,
        program=plan.score_program if local.request.scores else plan.program,
        ranks=RankStep(),
        sample=local.batch if _is_sample_due(policy, local) else None,
    )


def _agree_with_others(policy: StepPolicy, group: Distributed, local: LocalStep) -> AgreedStep:
    ranks, budgets = group.ranks, policy.model_state.budgets
    gather: GatherOption = ""
    if group.topology.lockstep:
        gather = policy.config.gather if group.topology.gathers else "microbatch"
    while True:
        own = _prompts_of_rank(policy, local)
        plans = _priced(policy, local, local.plan, *_plan_once(policy, local, local.plan))
        proposal = _proposal(policy, group, local, plans, own, gather)
        proposals = ranks.exchange(proposal)
        least, prices = least_budget(proposals), common_calibration(proposals)
        if least is None and prices is None:
            break
        # Plan again with the same budget and prices. All ranks repeat this exchange.
        ranks.phase = "apart"
        if least is not None:
            budgets.agree(policy.config, least)
        if prices is not None:
            policy.model_state.use_calibration(policy.config, prices)
        local = check_and_plan(policy, local.request)
    if not any(proposal.error is not None for proposal in proposals):
        policy.model_state.agreed.add(policy.config.attention_kernel)
    shared, exchanging = _common_prompts(policy, proposals), None
    if shared:
        # All ranks repeat this exchange, with plans that exchange prompts.
        ranks.phase = "apart"
        scored = any(each.offer.program.scores for each in proposals)
        offer, exchanging = _exchanging(policy, local, shared, own, ranks.index, scores=scored)
        proposals = ranks.exchange(replace(proposal, exchanged=offer))
    ranks.phase = "joined"
    try:
        agreement = agreed(
            proposals,
            ranks.index,
            ranks.global_ranks,
            gather=gather,
            batches=ranks.batches if group.topology.shares_batches else None,
            split=policy.config.split,
            prompts=shared,
            shape=policy.host.shape,
            stages=policy.host.links.stages,
            strict=policy.config.memory_budget_bytes is not None,
        )
    except ForkpointError:  # the same on all ranks
        ranks.phase = "told"
        raise
    if agreement.prompts:
        assert exchanging is not None
        plans = exchanging
    return _agreed_step(policy, group, local, agreement, plans)


def _agreed_step(
    policy: StepPolicy,
    group: Distributed,
    local: LocalStep,
    agreement: Agreement,
    plans: RankPlans,
) -> AgreedStep:
    """The step of this rank, with its plan for the agreed gathering of weights and exchange of
    prompts."""
    host, scores = policy.host, local.request.scores
    gathering, splitting = agreement.gathering, agreement.splitting
    plan, program, staged = plans.lockstep, agreement.program, agreement.staged
    if staged is not None:
        plan = local.plans[min(staged.size, len(local.plans) - 1)]
    if gathering is not None and group.topology.gathers:
        if gathering.taken == "step":
            plan = plans.once or plan
            program = plan.program
            if not agreement.prompts:
                statistics = agreement.statistics
                gathers = statistics is not None and statistics.gathers
                program = _program(plan, scores, gathers or bool(agreement.parts))
        plan = replace(plan, gather=gathering.taken, gather_reason=gathering.reason)
    if splitting is not None:
        plan = replace(plan, split=splitting.taken, split_reason=splitting.reason)
    step = agreement.step(group.ranks, mean=local.averages)
    if staged is not None:
        plan = replace(plan, program=program)
        plan = stage_plan(plan, staged.schedule, host.links.stage, staged.budget_bytes)
        program = plan.program
    exchange = None
    if agreement.prompts:
        exchange = PromptExchange(
            step, agreement.prompts, plans.prompts, plan, host.model, host.device
        )
    return AgreedStep(
        local=local,
        plan=plan if scores else replace(plan, program=program),
        program=program,
        ranks=step,
        sample=agreement.sample,
        denominators=None if local.averages else agreement.counts,
        statistics=agreement.statistics,
        exchange=exchange,
        encoders=agreement.encoders,
        gather=None if gathering is None else gathering.taken,
    )


# Proposals
# ------------------------------------------------------------


def _proposal(
    policy: StepPolicy,
    group: Distributed,
    local: LocalStep,
    plans: RankPlans,
    own: Mapping[str, PromptOfBatch],
    gather: GatherOption,
) -> Proposal:
    """Make this rank's proposal. `own`: prompts that it can exchange."""
    request, batch, plan, loss = local.request, local.batch, local.plan, local.loss
    host = policy.host
    idle = () if batch.media else host.entry.encoder.modules
    share = local.routers.share() if local.routers else None
    gathers = loss is not None and loss.across_ranks
    shares_batches = group.topology.shares_batches
    gathers_any = gathers or (share is not None and share.gathers)
    sizes = local.plans if host.links.stages and not request.scores else ()
    outline = None
    if batch.media and host.topology.reduces and gather != "step":
        outline = MediumOutline.of(host.entry.encoder.sample(batch.media))
    return Proposal(
        _described(policy, group, local, gather),
        held=_held(host, training=request.training),
        scale=None if local.averages else local.scale,
        offer=_offer(_program(plan, request.scores, gathers_any), plan, plans.costs),
        budget_bytes=policy.model_state.budgets.of(policy.host, policy.config),
        calibration=policy.model_state.to_agree(policy.host, policy.config),
        trains=plan.num_loss_entries > 0,
        trainable=not request.training or has_trainable(host.model, idle),
        trained_tokens=batch.trained_tokens,
        rollouts=len(batch),
        groups=group_digests(batch),
        couples=coupled(loss, batch),
        gathered=batch if gathers else None,
        statistics=share,
        sample=sample_of(batch, host) if _is_sample_due(policy, local) and len(batch) else None,
        prompts={name: each.edges for name, each in own.items()},
        contents=(
            contents_of(batch, local.plans, local.factors, policy.config)
            if shares_batches
            else None
        ),
        trains_encoder=bool(batch.media) and plan.capabilities.trains_encoder,
        outline=outline,
        sizes=offers_of(
            sizes,
            policy.model_state.calibration(host, policy.config),
            [_program(each, False, gathers_any) for each in sizes],
        ),
    )


def _offer(program: Program, plan: Plan, costs: RankCosts) -> Offer:
    return Offer(program, tuple(float(m.tokens) for m in plan.microbatches), costs, plan.media)


def _described(
    policy: StepPolicy, group: Distributed, local: LocalStep, gather: GatherOption
) -> str:
    """The call, with all options that must be the same on every rank."""
    request, config, host = local.request, policy.config, policy.host
    parts = [local.call]
    if gather:
        parts.append(f"gather={gather!r}")
    if request.exchanges:
        parts.append(f"split={config.split!r}")
    if request.training:
        # Gradients are reduced in this dtype.
        parts.append(f"grad_accumulation_dtype={config.grad_accumulation_dtype!r}")
    if request.training and host.topology.reduces:
        # The last stage of a pipeline scales the loss for all stages.
        parts.append(f"gradients divided by {group.factor(mean=False):g}")
    splits = not {"tensor", "expert", "context"}.isdisjoint(group.topology.relations)
    if request.training and splits and host.entry.checkpointed:
        # Layers that run again repeat their exchanges.
        parts.append("with gradient checkpointing of the model")
    if group.topology.shares_batches:
        # Ranks exchange these results, and parts of layers in the dtype of autocast.
        parts.append(f"head_statistics={config.head_statistics!r}")
        if torch.is_autocast_enabled(kind := host.device.type):
            parts.append(f"autocast to {torch.get_autocast_dtype(kind)}")
    return ", ".join(parts)


def _held(host: ModelHost, *, training: bool) -> Held:
    """The parameters of this rank. `training`: whether the call gives gradients."""
    # Ranks of tensor and expert parallelism can have parts of different sizes.
    divided = not {"tensor", "expert"}.isdisjoint(host.topology.relations)
    parameters, trained, count = hashlib.blake2b(), hashlib.blake2b(), 0
    for name, parameter in host.model.named_parameters():
        size = 0 if divided else tuple(parameter.shape)
        parameters.update(f"{name} {parameter.dtype} {size};".encode())
        if training and parameter.requires_grad:
            trained.update(f"{name};".encode())
            count += 1
    return Held(host.links.index, parameters.hexdigest(), trained.hexdigest(), count)


def _is_sample_due(policy: StepPolicy, local: LocalStep) -> bool:
    """Whether a self-check is due before this step."""
    return local.checked is not None and policy.model_state.checks.is_due(local.checked)


def _program(plan: Plan, scores: bool, gathers: bool) -> Program:
    """A rank's instructions: only scores with `scores`, or scores first with `gathers`."""
    if scores:
        return plan.score_program
    return plan.with_program(scores=True).program if gathers else plan.program


# Plans for both ways to gather weights
# ------------------------------------------------------------


def _priced(
    policy: StepPolicy,
    local: LocalStep,
    plan: Plan,
    once: Plan | None,
    why_not: str,
    prompts: tuple[PlannedPrompt, ...] = (),
) -> RankPlans:
    """The plans for both ways to gather weights, with their costs."""
    calibration = policy.model_state.calibration(policy.host, policy.config)
    scores = local.request.scores
    costs = costs_of_rank(plan, once, calibration, scores=scores, why_not=why_not)
    return RankPlans(plan, once, costs, prompts)


def _plan_once(
    policy: StepPolicy, local: LocalStep, plan: Plan, prompts: tuple[PlannedPrompt, ...] = ()
) -> tuple[Plan | None, str]:
    """The plan if weights are gathered once a step, or None and the reason why there is none.

    Gathered weights count against the memory budget, unless the configuration asks for them.
    """
    if not policy.host.topology.gathers or policy.config.gather == "step":
        return plan, ""
    if policy.config.gather == "microbatch":
        return None, "as asked"
    holder = policy.host.group
    weights = holder.held_bytes("step") - holder.held_bytes("microbatch")
    budget, peak = plan.memory_budget_bytes, plan.predicted_peak_bytes
    if budget is None or peak is None or peak + weights <= budget:
        return plan, ""
    why_not = (
        f"whole weights ({format_bytes(weights)} more) do not fit the memory budget of "
        f"{format_bytes(budget)}"
    )
    # A plan of the caller's is not replaced.
    if local.request.plan is not None or budget <= weights:
        return None, why_not
    try:
        found = _replan(policy, local, budget - weights, prompts)
    except PlanError:
        return None, why_not
    return (found, "") if found.fits else (None, why_not)


def _replan(
    policy: StepPolicy,
    local: LocalStep,
    budget_bytes: int | None,
    prompts: tuple[PlannedPrompt, ...],
) -> Plan:
    return plan_within(
        policy, local.batch, local.loss, budget_bytes, local.router_demand, prompts=prompts or None
    )


# Prompts of several ranks
# ------------------------------------------------------------


def _prompts_of_rank(policy: StepPolicy, local: LocalStep) -> dict[str, PromptOfBatch]:
    """By digest, the prompts of this rank that it can exchange, if other ranks have them."""
    able = local.request.exchanges and local.request.plan is None
    # Digests of prompts do not include routed_experts.
    able = able and local.batch.routed_experts is None
    if not able or policy.host.topology.shares_batches:
        return {}
    if policy.config.split == "replicate" or cannot_exchange(policy.config):
        return {}
    return prompts_of(local.batch, local.plan.run_lengths)


def _common_prompts(policy: StepPolicy, proposals: Sequence[Proposal]) -> tuple[SharedPrompt, ...]:
    """Prompts of several ranks for which an exchange is priced, the same on all ranks. () if
    ranks make different calls, which are refused later."""
    if any(p.error is not None for p in proposals) or len({p.call for p in proposals}) > 1:
        return ()
    tokens = [sum(proposal.offer.tokens) for proposal in proposals]
    found = shared_prompts([proposal.prompts for proposal in proposals], tokens)
    asked = policy.config.split == "exchange"
    return found if asked or worth_pricing(found, tokens) else ()


def _exchanging(
    policy: StepPolicy,
    local: LocalStep,
    shared: tuple[SharedPrompt, ...],
    own: Mapping[str, PromptOfBatch],
    index: int,
    *,
    scores: bool,
) -> tuple[Offer | str, RankPlans | None]:
    """This rank's offer and plans for a step in which prompts are exchanged, or the reason why it
    has none.

    `shared`: all exchanged prompts of the step. `own`: prompts of this rank. `scores`: whether all
    ranks run a pass of scores first.
    """
    if local.request.plan is not None:
        return "the caller passed a plan", None
    plan = local.plan
    prompts = planned_prompts(shared, own, index)
    if prompts:
        budget = policy.model_state.budgets.of(policy.host, policy.config)
        try:
            plan = _replan(policy, local, budget, prompts)
        except PlanError as error:
            return str(error), None
        if not plan.fits:
            return "their prefix caches do not fit the memory budget", None
    once, why_not = _plan_once(policy, local, plan, prompts)
    scores = scores or any(each.program.has_scores for each in (plan, once or plan))

    def exchanging(plan: Plan) -> Plan:
        return replace(plan, split="exchange").with_program(scores=scores)

    lockstep = exchanging(plan)
    if once is not None:
        once = lockstep if once is plan else exchanging(once)
    found = _priced(policy, local, lockstep, once, why_not, prompts)
    return _offer(lockstep.program, lockstep, found.costs), found
