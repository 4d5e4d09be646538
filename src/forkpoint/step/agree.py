"""The second stage of a step: ranks agree on it, by one exchange over CPUs or a few."""

from dataclasses import replace

from forkpoint.engine.distributed import Distributed
from forkpoint.engine.prompt_exchange import PromptExchange
from forkpoint.errors import ForkpointError
from forkpoint.losses.base import Loss, is_own
from forkpoint.parallel.agreement import (
    Agreement,
    Coupling,
    GatherOption,
    Proposal,
    agreed,
    coupled,
    group_digests,
    least_budget,
)
from forkpoint.parallel.copies import contents_of
from forkpoint.parallel.step import SingleProcessStep
from forkpoint.plan import Plan
from forkpoint.plan.program import Program
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.plan import check_and_plan
from forkpoint.step.rank_plans import ExchangePlans, RankPlanOptions
from forkpoint.step.request import AgreedStep, LocalStep, StepPolicy
from forkpoint.step.self_check import sample_of


def agree(policy: StepPolicy, local: LocalStep) -> AgreedStep:
    """Agree on a step with the other ranks; in one process it runs as it was planned.

    Collective. On ranks this runs within `run_on_ranks`, which tells them of an error here. Raises
    RankError where another rank cannot run the step.
    """
    group = policy.host.group
    if group is not None:
        return _agree_with_others(policy, group, local)
    plan = local.plan
    return AgreedStep(
        local=local,
        plan=plan,
        program=plan.score_program if local.request.scores else plan.program,
        ranks=SingleProcessStep(),
        sample=local.batch if _is_sample_due(policy, local) else None,
    )


def _agree_with_others(policy: StepPolicy, group: Distributed, local: LocalStep) -> AgreedStep:
    ranks, budgets = group.ranks, policy.model_state.budgets
    gather = policy.config.gather if group.gathers else "microbatch" if group.lockstep else ""
    while True:
        options = RankPlanOptions(policy, local)
        own = options.prompts_of_rank()
        proposal, once = _proposal(options, group, gather)
        proposal = replace(proposal, prompts={name: each.edges for name, each in own.items()})
        proposals = ranks.exchange(proposal)
        least = least_budget(proposals)
        if least is None:
            break
        # Plan again, within the same budget; the others come to this exchange once more.
        ranks.phase = "apart"
        budgets.agree(policy.config, least)
        local = check_and_plan(policy, local.request)
    shared, plans = options.common(proposals), None
    if shared:
        # The others come to this exchange once more, with the plans for it.
        ranks.phase = "apart"
        scored = any(each.program.scores for each in proposals)
        exchanged, plans = options.exchanged(shared, own, ranks.index, scores=scored)
        proposals = ranks.exchange(replace(proposal, exchanged=exchanged))
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
        )
    except ForkpointError:  # the same on all ranks
        ranks.phase = "told"
        raise
    return _agreed_step(options, group, agreement, once, plans)


def _is_sample_due(policy: StepPolicy, local: LocalStep) -> bool:
    """Whether the model is to be compared with its stock forward before this step."""
    request = local.request
    return request.sampled and policy.model_state.checks.is_due(
        policy.host, policy.config, local.fingerprint, training=request.training
    )


def _proposal(
    options: RankPlanOptions, group: Distributed, gather: GatherOption
) -> tuple[Proposal, Plan | None]:
    """Proposal of this rank to the others, and its plan for weights that are gathered once."""
    policy, local = options.policy, options.local
    request, batch, plan, loss = local.request, local.batch, local.plan, local.loss
    call = f"{local.call}, gather={gather!r}" if gather else local.call
    call = f"{call}, split={policy.config.split!r}" if request.exchanges else call
    due = _is_sample_due(policy, local)
    share = local.routers.share() if local.routers else None
    gathers = loss is not None and loss.across_ranks
    held, once = options.held(plan, scores=request.scores)
    proposal = Proposal(
        call,
        program=_program(plan, request.scores, gathers or (share is not None and share.gathers)),
        costs=tuple(float(m.tokens) for m in plan.microbatches),
        held=held,
        budget_bytes=policy.model_state.budgets.of(policy.host, policy.config),
        trains=plan.num_loss_entries > 0,
        trained_tokens=batch.trained_tokens,
        rollouts=len(batch),
        groups=group_digests(batch),
        couples=_coupling(loss, batch),
        gathered=batch if gathers else None,
        statistics=share,
        sample=sample_of(batch) if due and len(batch) else None,
    )
    if group.topology.shares_batches:
        proposal = replace(proposal, contents=contents_of(batch, (plan,), local.factors))
    return proposal, once


def _coupling(loss: Loss | None, batch: RolloutBatch) -> Coupling:
    """Rollouts that must be on one rank, because the loss needs them together."""
    if loss is None or is_own(loss) or loss.decomposition != "joint" or loss.across_ranks:
        return ""
    return coupled(loss.coupling(batch), batch)


def _agreed_step(
    options: RankPlanOptions,
    group: Distributed,
    agreement: Agreement,
    once: Plan | None,
    plans: ExchangePlans | None,
) -> AgreedStep:
    """The step of this rank: the plan for how weights are held and which prompts are exchanged.

    Args:
        options: of this rank.
        group: what holds the model.
        agreement: of the ranks.
        once: the plan for weights that are gathered once.
        plans: those for exchanged prompts.
    """
    policy, local = options.policy, options.local
    host, request = policy.host, local.request
    gathering, splitting = agreement.gathering, agreement.splitting
    plan, program = local.plan, agreement.program
    if agreement.prompts:
        assert plans is not None
        plan, once = plans.lockstep, plans.once
    if gathering is not None and group.gathers:
        if gathering.gather == "step":
            plan = once or plan
            program = plan.program
            if not agreement.prompts:
                statistics = agreement.statistics
                gathers = statistics is not None and statistics.gathers
                program = _program(plan, request.scores, gathers or bool(agreement.parts))
        plan = replace(plan, gather=gathering.gather, gather_reason=gathering.reason)
    if splitting is not None:
        plan = replace(plan, split=splitting.split, split_reason=splitting.reason)
    step = agreement.step(group.ranks, mean=local.averages)
    exchange = None
    if plans is not None and agreement.prompts:
        prompts = agreement.prompts
        exchange = PromptExchange(step, prompts, plans.prompts, plan, host.model, host.device)
    return AgreedStep(
        local=local,
        plan=plan if request.scores else replace(plan, program=program),
        program=program,
        ranks=step,
        sample=agreement.sample,
        denominators=None if local.averages else agreement.counts,
        statistics=agreement.statistics,
        exchange=exchange,
        gather=None if gathering is None else gathering.gather,
    )


def _program(plan: Plan, scores: bool, gathers: bool) -> Program:
    """Instructions that a rank runs: `scores` alone, or with those first that a loss `gathers`."""
    if scores:
        return plan.score_program
    return plan.with_program(scores=True).program if gathers else plan.program
