"""A step of several ranks: the exchange before it, the check of the model, and its end."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

from forkpoint.config import Config
from forkpoint.engine.compiling import WARNING
from forkpoint.engine.distributed import Distributed
from forkpoint.engine.guard import Step
from forkpoint.engine.host import Host
from forkpoint.engine.prompt_exchange import PromptExchange
from forkpoint.errors import ForkpointError, RankError
from forkpoint.losses.base import Loss, is_own
from forkpoint.parallel.agreement import (
    Agreement,
    Proposal,
    agreed,
    coupled,
    group_digests,
    least_budget,
)
from forkpoint.parallel.call import run_on_ranks
from forkpoint.parallel.copies import contents_of
from forkpoint.parallel.statistics import RouterEnd, StatisticsOfRanks, StatisticsShare
from forkpoint.parallel.step import StepOfRanks
from forkpoint.plan import Plan
from forkpoint.plan.program import Program
from forkpoint.plan.shared_prompts import PlannedPrompt
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.rank_plans import ExchangePlans, Ways
from forkpoint.step.sample_checks import SampleChecks
from forkpoint.step.self_check import sample_of

_log = logging.getLogger("forkpoint")
T = TypeVar("T")
Looked = TypeVar("Looked", bound=tuple[Any, ...])


class JointStep:
    """One call of a policy, on every rank; on a rank that is alone it does what that one does."""

    def __init__(
        self,
        step: Step,
        host: Host,
        config: Config,
        checks: SampleChecks,
        ways: Ways,
        *,
        training: bool,
    ) -> None:
        """`training`: whether forwards record a graph. On ranks this is within `run_on_ranks`."""
        self.step: Step = step
        self.host: Host = host
        self.config: Config = config
        self.checks: SampleChecks = checks
        self.training: bool = training
        self.ways: Ways = ways
        self.agreement: Agreement | None = None
        """None where this rank is alone, and before `agree`."""
        self.ranks: StepOfRanks | None = None
        self.exchange: PromptExchange | None = None
        """Of prompts, where ranks have agreed on one."""
        self._met = False
        """Whether all ranks have run the forwards of the sample."""
        self._batch: RolloutBatch | None = None
        self._fingerprint = 0

    def agree(
        self,
        call: str,
        batch: RolloutBatch,
        looked_at: Callable[[], Looked],
        *,
        loss: object = None,
        scores: bool = False,
        sampled: bool = True,
        exchanges: bool = False,
        numbers: Callable[[Looked], Sequence[float]] = lambda _: (),
        statistics: Callable[[Looked], StatisticsShare | None] = lambda _: None,
    ) -> Looked:
        """Agree on a step with the other ranks, if there are any. Collective.

        Args:
            call: what must be the same on all ranks.
            batch: this rank's rollouts.
            looked_at: this rank's checks; gives its plan and the model's fingerprint first. Its
                error is told to the other ranks by `run_on_ranks`.
            loss: of `forward_backward`. A function's gradients are averaged over the ranks.
            scores: whether forwards alone run.
            sampled: whether the model is compared with the stock model where that is due.
            exchanges: whether ranks may exchange prompts.
            numbers: what ranks with the same batch have in common besides it, but for rounding.
            statistics: this rank's part of statistics of routers.

        Returns the values of `looked_at`. Raises its error, or RankError for that of another rank.
        """
        group = self.host.group
        if group is None:
            found = looked_at()
            self._batch, self._fingerprint = batch if sampled else None, found[1]
            return found
        gather = self.config.gather if group.gathers else "microbatch" if group.lockstep else ""
        call = f"{call}, gather={gather!r}" if gather else call
        call = f"{call}, split={self.config.split!r}" if exchanges else call
        ranks = group.ranks
        while True:
            found = looked_at()
            own = self.ways.prompts(batch, found[0]) if exchanges else {}
            share = statistics(found)
            proposal, once = self._proposal(
                call, found, batch, loss=loss, scores=scores, sampled=sampled, share=share
            )
            if ranks.shares_batches:
                proposal = replace(proposal, contents=contents_of(batch, found[:1], numbers(found)))
            proposal = replace(proposal, prompts={name: each.edges for name, each in own.items()})
            proposals = ranks.exchange(proposal)
            least = least_budget(proposals)
            if least is None:
                break
            # Plan again, within the same budget; the others come to this exchange once more.
            ranks.phase = "apart"
            self.ways.budgets.agree(self.config, least)
        shared, plans = self.ways.common(proposals), None
        if shared:
            # The others come to this exchange once more, with the plans for it.
            ranks.phase = "apart"
            scored = any(each.program.scores for each in proposals)
            exchanged, plans = self.ways.exchanged(shared, own, found[0], scores=scored)
            proposals = ranks.exchange(replace(proposal, exchanged=exchanged))
        ranks.phase = "joined"
        try:
            self.agreement = agreed(
                proposals,
                ranks.index,
                ranks.global_ranks,
                gather=gather,
                batches=ranks.batches if ranks.shares_batches else None,
                split=self.config.split,
                prompts=shared,
            )
        except ForkpointError:  # the same on all ranks
            ranks.phase = "told"
            raise
        self._batch = self.agreement.sample
        self._give_up_compiling(proposals)
        self.ranks = self.agreement.step(ranks, mean=is_own(loss))
        plan = self._chosen(found[0], once, scores, plans)
        return (plan, *found[1:])  # pyright: ignore[reportReturnType]

    @property
    def statistics(self) -> StatisticsOfRanks | None:
        """Statistics of routers of all ranks, once they have agreed; None where this one is
        alone."""
        return None if self.agreement is None else self.agreement.statistics

    @property
    def router_end(self) -> RouterEnd | None:
        """Results of the routers of all ranks, once the step has ended; None where this one is
        alone."""
        return None if self.ranks is None else self.ranks.router

    def _proposal(
        self,
        call: str,
        found: tuple[Any, ...],
        batch: RolloutBatch,
        *,
        loss: object,
        scores: bool,
        sampled: bool,
        share: StatisticsShare | None,
    ) -> tuple[Proposal, Plan | None]:
        """Proposal of this rank to the others, and its plan for weights that are gathered once."""
        assert self.host.group is not None
        plan: Plan = found[0]
        self._fingerprint = found[1]
        due = sampled and self.checks.is_due(
            self.host, self.config, self._fingerprint, training=self.training
        )
        couples = ""
        gathers = isinstance(loss, Loss) and loss.across_ranks
        if (
            isinstance(loss, Loss)
            and not is_own(loss)
            and loss.decomposition == "joint"
            and not gathers
        ):
            couples = coupled(loss.coupling(batch), batch)
        held, once = self.ways.held(plan, scores=scores)
        proposal = Proposal(
            call,
            program=_program(plan, scores, gathers or (share is not None and share.gathers)),
            costs=tuple(float(m.tokens) for m in plan.microbatches),
            held=held,
            budget_bytes=self.ways.budgets.of(self.host, self.config),
            compiler_failure=self.host.compiling.failure,
            trains=plan.labelled > 0,
            trained_tokens=batch.trained_tokens,
            rollouts=len(batch),
            groups=group_digests(batch),
            couples=couples,
            gathered=batch if gathers else None,
            statistics=share,
            sample=sample_of(batch) if due and len(batch) else None,
        )
        return proposal, once

    def _chosen(
        self, plan: Plan, once: Plan | None, scores: bool, plans: ExchangePlans | None
    ) -> Plan:
        """The plan for the way to hold weights, and for what is done about prompts, that was agreed
        on; `agreement.program` runs."""
        assert self.agreement is not None and self.host.group is not None
        gathering, splitting = self.agreement.gathering, self.agreement.splitting
        own: tuple[PlannedPrompt, ...] = ()
        if self.agreement.prompts:
            assert plans is not None
            plan, once, own = plans.lockstep, plans.once, plans.prompts
        if gathering is not None and self.host.group.gathers:
            if gathering.gather == "step":
                plan = once or plan
                program = plan.program
                if not self.agreement.prompts:
                    statistics = self.agreement.statistics
                    gathers = statistics is not None and statistics.gathers
                    program = _program(plan, scores, gathers or bool(self.agreement.parts))
                self.agreement = replace(self.agreement, program=program)
            plan = replace(plan, gather=gathering.gather, gather_reason=gathering.reason)
        if splitting is not None:
            plan = replace(plan, split=splitting.split, split_reason=splitting.reason)
        if self.agreement.prompts:
            assert self.ranks is not None
            prompts = self.agreement.prompts
            host = self.host
            self.exchange = PromptExchange(self.ranks, prompts, own, plan, host.model, host.device)
        return plan

    def _give_up_compiling(self, proposals: Sequence[Proposal]) -> None:
        """Run blocks eagerly where the compiler has failed on any rank."""
        group, compiling = self.host.group, self.host.compiling
        assert group is not None
        for rank, proposal in zip(group.ranks.global_ranks, proposals, strict=True):
            if proposal.compiler_failure and compiling.failure is None:
                compiling.failure = f"on rank {rank}: {proposal.compiler_failure}"
                _log.warning(WARNING, compiling.failure)

    def check_sample(self) -> None:
        """Compare the model on a sample of the batch, where that is due. Collective.

        After it weights are held as was agreed.
        """
        group = self.host.group
        if self.ranks is None or group is None:
            self._check()
            return
        if self._batch is not None:
            error = None
            try:
                self._check()
            except RankError:  # of another rank, of which all know
                raise
            except ForkpointError as found:
                error = found
                if group.lockstep and not self._met:
                    # It came within the forwards. If it did on this rank alone, the others wait in
                    # what these gather, and do not come to what is below.
                    self.ranks.ranks.may_be_missed(found)
            group.settle()
            self.ranks.same(error)
        if self.agreement is not None and self.agreement.gathering is not None:
            group.use(self.agreement.gathering.gather, self.step.changes)

    def _check(self) -> None:
        if self._batch is not None:
            self.checks.run(
                self.step,
                self.host,
                self.config,
                self._batch,
                self._fingerprint,
                training=self.training,
                agreed=self.ranks is not None,
                on_any_rank=self._on_any_rank,
            )

    def _on_any_rank(self, own: bool) -> bool:
        """Whether `own` is true on any rank. Collective: all have run the sample's forwards."""
        if self.ranks is None:
            return own
        found = self.ranks.any_rank(own)
        self._met = True
        return found


def _program(plan: Plan, scores: bool, gathers: bool) -> Program:
    """Instructions that a rank runs: `scores` alone, or with those first that a loss `gathers`."""
    if scores:
        return plan.score_program
    return plan.with_program(scores=True).program if gathers else plan.program


def run_joint_step(host: Host, group: Distributed, work: Callable[[Step], T]) -> T:
    """Call `work` with a step, on all ranks; it ends on all of them, however it ends on one.

    Nothing is repeated where memory runs out: ranks would have to repeat it together.
    """
    step = Step(host.device)

    def run() -> T:
        try:
            return step.run(lambda: work(step))
        except Exception as error:
            host.compiling.give_up(error)  # all ranks hear of it before the next step
            raise

    return run_on_ranks(
        group.ranks,
        run,
        lockstep=group.lockstep,
        succeeded=lambda: step.outcome.gradients == "added",
    )


def kind_of(loss: object) -> str:
    """A loss's class and options, as far as they can be told; of a function, that it is one."""
    if isinstance(loss, Loss) and not is_own(loss):
        return repr(loss) if is_dataclass(loss) else type(loss).__qualname__
    return "a function"
