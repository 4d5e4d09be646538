"""The work of a policy's calls, within a step that can be undone."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from forkpoint.config import Config
from forkpoint.engine.engine import Engine
from forkpoint.engine.fallback import run_or_fall_back
from forkpoint.engine.guard import Step, StepOutcome
from forkpoint.engine.host import Host, Settings
from forkpoint.engine.prompt_exchange import PromptExchange
from forkpoint.engine.route_replay import RouteReplay
from forkpoint.engine.routing import Routing
from forkpoint.engine.timing import Observer
from forkpoint.errors import ConfigError, PlanError, RolloutError, UnsupportedError
from forkpoint.hosts.tensor_parallel import ModelParallel
from forkpoint.hosts.unreduced import check_reduced
from forkpoint.losses.base import (
    Denominators,
    Loss,
    LossFunction,
    as_loss,
    check_denominators,
    is_own,
)
from forkpoint.losses.router import RouterLoss
from forkpoint.losses.views import batch_denominators, check_range
from forkpoint.losses.zeros import zero_rollouts
from forkpoint.parallel.statistics import RouterEnd
from forkpoint.parallel.step import StepOfRanks
from forkpoint.plan import Plan, make_plan
from forkpoint.plan.routing import RouterDemand
from forkpoint.plan.runs import run_lengths
from forkpoint.plan.shared_prompts import PlannedPrompt
from forkpoint.rollouts.batch import Rollout, RolloutBatch, short
from forkpoint.step.differentiable import FirstHalf, GivenWeights, sizes_of
from forkpoint.step.joint_steps import JointStep, kind_of, run_joint_step
from forkpoint.step.kept import Kept
from forkpoint.step.rank_plans import Again, Ways
from forkpoint.step.results import Scores, StepStats
from forkpoint.step.router_steps import (
    RouterWork,
    called,
    check_averaged,
    check_routed_experts,
    has_several_batches,
    route_replay,
    router_work,
)
from forkpoint.tree.forest import IntArray

T = TypeVar("T")
ROUTER = "router_loss"
"""The name of a router loss among what gradients are computed by."""


Rollouts = RolloutBatch | Sequence[Rollout]
"""Argument of a policy's calls: a batch, or the rollouts of one."""


class PolicySteps:
    """A model and its options, and what runs in its calls. `Policy` is made of it."""

    def __init__(self, host: Host, config: Config) -> None:
        """Raises ConfigError where the configuration does not fit what holds the model on ranks."""
        sharded = host.group is not None and host.group.reduces
        if config.gather != "auto" and not sharded:
            raise ConfigError(
                f"gather is {config.gather!r}, and this rank has all of the model's weights. Leave "
                "the option out, or shard the model with fully_shard."
            )
        if config.gather == "step" and isinstance(host.group, ModelParallel):
            raise ConfigError(
                "gather is 'step', and transformers has split the model over ranks: its own "
                "collectives lie within forwards, so ranks run in lockstep. Leave the option out."
            )
        group = host.group
        if config.split == "exchange" and (group is None or group.ranks.shares_batches):
            why = (
                "this rank trains its model alone"
                if group is None
                else "transformers has split the model over ranks, of which each has a part of "
                "every prefix cache"
            )
            raise ConfigError(
                f"split is 'exchange', and {why}. Leave the option out; prompts are exchanged by "
                "ranks of fully_shard and DistributedDataParallel."
            )
        if sharded and config.grad_accumulation_dtype == "float32":
            raise ConfigError(
                "grad_accumulation_dtype is 'float32', and the model is sharded by fully_shard, "
                "which adds up gradients itself, in its reduce_dtype. Leave the option out and "
                "shard with mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)."
            )
        self.host: Host = host
        self.config: Config = config
        self.observer: Observer | None = None
        """Called with each event of a step before it runs: for measurements."""
        self.last_step: StepOutcome | None = None
        """The effect on `.grad` of the last call of `forward_backward` that began to run: another
        object for every call, made once its arguments have been checked and its plan made."""
        self._kept: Kept = Kept()

    def _make_plan(
        self, batch: RolloutBatch, loss: Loss | LossFunction | None, routers: RouterDemand | None
    ) -> Plan:
        budget_bytes = self._kept.budgets.of(self.host, self.config)
        plan = self._planned(batch, loss, budget_bytes, routers)
        self._kept.budgets.planned(plan)
        return plan

    def _planned(
        self,
        batch: RolloutBatch,
        loss: Loss | LossFunction | None,
        budget_bytes: int | None,
        routers: RouterDemand | None = None,
        *,
        prompts: tuple[PlannedPrompt, ...] | None = None,
    ) -> Plan:
        """The plan within a budget."""
        loss = None if loss is None else as_loss(loss)
        coupling = None if loss is None or loss.decomposition == "token" else loss.coupling(batch)
        given = self.config.memory_budget_bytes is not None
        return make_plan(
            batch,
            self.host.shape,
            replace(self.config, memory_budget=budget_bytes) if given else self.config,
            coupling=coupling,
            calibration=self._kept.calibration(self.host, self.config),
            capabilities=self.host.capabilities,
            measured_budget_bytes=budget_bytes,
            tempers=self.host.head == "logprobs",
            routers=routers,
            prompts=prompts,
            runs=self._runs(batch, loss, routers),
        )

    def _runs(
        self, batch: RolloutBatch, loss: Loss | None, routers: RouterDemand | None
    ) -> IntArray:
        """How many edges of each rollout a call needs: int64 [N]. `loss` is None for log-probs."""
        zero = None
        # Rollouts of other ranks may be coupled with those that are zero here.
        gathers = loss is not None and loss.across_ranks and self.host.group is not None
        if loss is not None and not gathers and not self.config.all_logprobs:
            zero = zero_rollouts(loss, batch)
        last_tokens = routers is not None and routers.last_tokens
        return run_lengths(batch, zero, whole=routers is not None, last_tokens=last_tokens)

    def _planned_again(
        self,
        batch: RolloutBatch,
        loss: Loss | LossFunction | None,
        demands: list[RouterDemand | None],
        budget_bytes: int | None,
        /,
        *,
        prompts: tuple[PlannedPrompt, ...] | None = None,
    ) -> Plan:
        """The plan another way, with what routers have demanded of the first."""
        return self._planned(batch, loss, budget_bytes, demands[-1], prompts=prompts)

    def _run(self, work: Callable[[Step], T], plan: Plan | None) -> T:
        """Run a step's work, and once more with a lower budget where memory ran out.

        `plan` is the one that the caller gave, if any: then there is no other.
        """
        if self.host.group is not None:
            return run_joint_step(self.host, self.host.group, work)
        before = self.last_step
        try:
            return run_or_fall_back(self.host, work)
        except torch.OutOfMemoryError:
            step = self.last_step
            lost = step is not None and step is not before and step.gradients == "cleared"
            if lost or plan is not None or not self._kept.budgets.lower(self.host, self.config):
                raise
        return run_or_fall_back(self.host, work)

    def _run_step(
        self,
        step: Step,
        batch: RolloutBatch,
        loss: Loss | LossFunction,
        denominators: Denominators | None,
        scale: float,
        plan: Plan | None,
        *,
        announced: bool,
        routers: tuple[RouterLoss | None, Tensor | None, bool] = (None, None, False),
    ) -> StepStats:
        """The work of `forward_backward`, for `step.run`. `announced`: with notes, and as
        `last_step`. `routers`: its last three arguments."""
        self.host.prepare(step.changes)
        router, counts, counted = routers
        demands: list[RouterDemand | None] = []

        def looked_at() -> tuple[Plan, int, Loss, float, RouterWork | None]:
            self._check_batch(batch)
            if announced:
                self._check_reduced()
            known = as_loss(loss)
            known.check_head(self.host.head)
            if len(batch):
                known.check(batch)
            check_range(batch, self.host.loss_dtype)
            check_routed_experts(self.host, batch)
            fingerprint = self.host.check(batch, training=True, routed=router is not None)
            check_denominators(denominators)
            factor = finite("scale", scale)
            work = router_work(self.host, batch, router, counts, expert_counts=counted)
            if work and router is not None:
                check_averaged(self.host.group, loss)
            chosen = self._plan_for(batch, plan, known, work)
            demands.append(work.demand() if work else None)
            return chosen, fingerprint, known, factor, work

        again = None if plan else partial(self._planned_again, batch, loss, demands)
        joint = self._joint(step, again, training=True)
        call = f"forward_backward of {kind_of(loss)}, denominators={denominators}"
        call += called(router, counts, expert_counts=counted)
        plan, _, known, factor, work = joint.agree(
            call,
            batch,
            looked_at,
            loss=loss,
            exchanges=router is None and not counted,
            numbers=lambda found: found[3:4],
            statistics=lambda found: found[4].share() if found[4] else None,
        )
        known_counts = denominators or batch_denominators(batch)
        if joint.agreement is not None and self.host.group is not None:
            plan = replace(plan, program=joint.agreement.program)
            if denominators is None and not is_own(loss):
                known_counts = joint.agreement.counts
        if announced:
            step.notes = True
            self.last_step = step.outcome
        routing = work.routing(plan, self.host, joint.statistics) if work else None
        replay = route_replay(self.host, plan, batch)
        engine = self._engine(
            plan, ranks=joint.ranks, routing=routing, replay=replay, exchange=joint.exchange
        )
        joint.check_sample()
        result = engine.forward_backward(step, plan, batch, known, known_counts, factor)
        self.host.compiling.proven = self.host.compiles
        cuda = self.host.device.type == "cuda"
        # What a device has failed at is raised here at the latest: it is waited for.
        value = self._kept.ratios.read(result.loss, result.per_token.get("logprobs"), batch)
        return StepStats(
            loss=value,
            logical_tokens=plan.logical_tokens,
            unique_tokens=plan.unique_tokens,
            computed_tokens=plan.computed_tokens,
            plan=plan,
            events=result.events,
            phase_ms=result.phase_ms,
            event_ms=result.event_ms,
            event_memory_bytes=result.event_memory_bytes,
            peak_memory_bytes=(torch.cuda.max_memory_allocated(self.host.device) if cuda else None),
            per_token={name: x_T.detach() for name, x_T in result.per_token.items()},
            offload=result.offload,
            router_loss=_loss_of(routing, joint.router_end) if routing and router else None,
            experts=routing.counts(joint.router_end) if routing else None,
            routes=replay.routes if replay else None,
        )

    def _backward(
        self,
        batch: RolloutBatch,
        first: FirstHalf,
        weights: GivenWeights,
        routing: Routing | None,
    ) -> None:
        """The second half of `logprobs`; `routing` is that of the first."""
        given = dict(weights)
        plan = first.plan
        weight = weights.pop(ROUTER, None)

        def work(step: Step) -> None:
            self.host.prepare(step.changes)

            def looked_at() -> tuple[Plan, int]:
                first.check_settings(self.host.settings())
                first.check_weights()
                found = self.host.check(batch, training=True, routed=routing is not None)
                first.done = True
                return plan, found

            joint = self._joint(step, training=True)
            call = f"backward of logprobs, entropies {'entropies' in weights}"
            aligned, _ = joint.agree(
                call, batch, looked_at, sampled=False, numbers=lambda _: sizes_of(given)
            )
            if joint.agreement is not None:
                aligned = replace(aligned, program=joint.agreement.program)
            step.notes = True
            self.last_step = step.outcome
            again = None if routing is None or weight is None else routing.again(weight)
            replay = route_replay(self.host, plan, batch)
            engine = self._engine(plan, ranks=joint.ranks, routing=again, replay=replay)
            joint.check_sample()
            engine.backward(step, aligned, batch, weights, first.check_values)
            self.host.compiling.proven = self.host.compiles
            if self.host.device.type == "cuda":
                torch.cuda.synchronize(self.host.device)  # what the device fails at is raised here

        self._run(work, plan)

    def _engine(
        self,
        plan: Plan,
        *,
        ranks: StepOfRanks | None,
        routing: Routing | None,
        replay: RouteReplay | None,
        exchange: PromptExchange | None = None,
    ) -> Engine:
        """The engine of a step with backwards."""
        return Engine(
            self.host,
            self._restoring(),
            self._kept.staging_of(plan, self.host, self.config),
            ranks=ranks,
            routing=routing,
            replay=replay,
            exchange=exchange,
            observers=() if self.observer is None else (self.observer,),
        )

    def _restoring(self) -> Config:
        """The configuration, with gradients restored while a compiled backward may yet fail."""
        if not self.host.compiles or self.host.compiling.proven:
            return self.config
        return replace(self.config, restore_grads=True)

    def _score(
        self,
        step: Step,
        batch: RolloutBatch,
        entropy: bool,
        plan: Plan | None,
        *,
        training: bool,
        routers: tuple[RouterLoss | None, bool] = (None, False),
        valued: bool = False,
    ) -> tuple[Scores, Routing | None, Settings | None]:
        """The work of `score`, for `step.run`; with `training` what a step refuses is refused, and
        the model's settings come along.
        `valued`: whether the value of the router loss is asked for."""
        self.host.prepare(step.changes)
        router, counted = routers
        demands: list[RouterDemand | None] = []
        computed: list[Settings] = []

        def looked_at() -> tuple[Plan, int, RouterWork | None]:
            self._check_batch(batch)
            if training:
                self._check_reduced()
            check_range(batch, self.host.loss_dtype)
            check_routed_experts(self.host, batch)
            if entropy and self.host.head == "values":
                raise UnsupportedError(
                    "entropies were asked for, but the model is a critic, which gives values; ask "
                    "the policy for them, or leave entropy=True out."
                )
            fingerprint = self.host.check(batch, training=training, routed=router is not None)
            if training:
                computed.append(self.host.settings())
            if valued and has_several_batches(self.host.group):
                raise UnsupportedError(
                    "policy.logprobs was given router= on several ranks, where a loss computed "
                    "from it is each rank's own and the router loss is of all their rollouts. Give "
                    "router= to policy.forward_backward."
                )
            work = router_work(self.host, batch, router, expert_counts=counted)
            demands.append(work.demand(scored=True) if work else None)
            return self._plan_for(batch, plan, None, work, scored=True), fingerprint, work

        again = None if plan else partial(self._planned_again, batch, None, demands)
        joint = self._joint(step, again, training=training)
        call = f"{'logprobs' if training else 'score'}, entropy={entropy}"
        call += called(router, expert_counts=counted)
        chosen, _, work = joint.agree(
            call,
            batch,
            looked_at,
            scores=True,
            statistics=lambda found: found[2].share() if found[2] else None,
        )
        program = joint.agreement.program if joint.agreement is not None else None
        joint.check_sample()
        routing = work.routing(chosen, self.host, joint.statistics) if work else None
        replay = route_replay(self.host, chosen, batch)
        engine = Engine(self.host, self.config, routing=routing, replay=replay)
        if routing is not None:
            routing.sums = router is not None
        result = engine.score(step, chosen, batch, entropy=entropy, program=program)
        own = None
        if routing is not None and routing.sums:
            routing.gather(joint.ranks)
            own = float(routing.value())
        if joint.ranks is not None:
            ending = routing.ending(own) if routing else None
            joint.ranks.settle(torch.zeros(()), None, gradients=False, router=ending)
        end = joint.router_end
        scores = Scores(
            result.per_token,
            chosen,
            result.events,
            router_loss=own if own is None or end is None else end.loss,
            own_router_loss=own,
            experts=routing.counts(end) if routing else None,
            routes=replay.routes if replay else None,
        )
        return scores, routing, computed[-1] if training else None

    def _joint(self, step: Step, again: Again | None = None, *, training: bool) -> JointStep:
        """`again` makes the plan within another memory budget, unless it was given."""
        kept, host, config = self._kept, self.host, self.config
        ways = Ways(host, config, kept.budgets, lambda: kept.calibration(host, config), again)
        return JointStep(step, host, config, kept.checks, ways, training=training)

    def _check_reduced(self) -> None:
        """Look at who reduces gradients, before the first of them."""
        if not self._kept.reduced:
            check_reduced(self.host.model, self.host.group)
            self._kept.reduced = True

    def _check_batch(self, batch: RolloutBatch) -> None:
        if not len(batch) and self.host.group is None:
            raise RolloutError(
                "There are no rollouts; a batch takes at least one, but for a rank that has none "
                "in a step of several ranks."
            )

    def _plan_for(
        self,
        batch: RolloutBatch,
        plan: Plan | None,
        loss: Loss | None,
        work: RouterWork | None,
        *,
        scored: bool = False,
    ) -> Plan:
        """`scored`: whether experts are counted before any backward in any case."""
        if plan is None:
            return self._make_plan(batch, loss, work.demand(scored=scored) if work else None)
        if not isinstance(plan, Plan):
            raise PlanError(
                f"the plan is {short(plan)} of type {type(plan).__name__}; give one that "
                "policy.plan(batch) made, or None."
            )
        if plan.split == "exchange":
            raise PlanError(
                "this plan is of a step in which ranks exchanged prefix caches, and says nothing "
                "of the other ranks. Make a plan with policy.plan(batch), or give none."
            )
        plan.check_batch(batch)
        plan.check_host(self.host.capabilities)
        if loss is not None and loss.decomposition != "token":
            plan.check_coupling(batch, loss.coupling(batch))
        if work is not None:
            work.check_plan(plan, scored=scored)
        plan.check_runs(batch, self._runs(batch, loss, work.demand() if work else None))
        return plan


def as_batch(given: object) -> RolloutBatch:
    """A batch itself, or the batch of a list of rollouts.

    Raises RolloutError for anything else.
    """
    if isinstance(given, RolloutBatch):
        return given
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        return RolloutBatch(given)
    raise RolloutError(
        f"the batch is {short(given)} of type {type(given).__name__}; it takes a RolloutBatch, or "
        "a list of Rollout objects."
    )


def _loss_of(routing: Routing, end: RouterEnd | None) -> float:
    return float(routing.loss) if end is None else end.loss


def finite(name: str, value: object) -> float:
    """An argument as a number: it may be one of Python, numpy or a tensor of one element."""
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name} is {short(value)}; it takes a finite number.")
    return number
