"""A step, from the arguments of a policy's call to its results.

    Request ─check_and_plan─► LocalStep ─agree─► AgreedStep ─execute─► Executed ─finish─► StepStats

`perform` runs these stages for `forward_backward`, `score`, `logprobs`, the backward of `logprobs`,
and the steps that `verify` compares. Stages are functions, and the values between them are frozen
(step/request.py). All changes of the model, gradients and thread are recorded in one transaction
(engine/transaction.py).

- `check_and_plan` (step/plan.py): checks the request and the model, and plans the batch.
- `agree` (step/agree.py): exchanges with the other ranks; skipped in a single process.
- `execute`: the self-check on a sample, if it is due, then the engine's passes.
- `finish`: makes the result. It waits for the device, and raises its errors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from forkpoint.engine.engine import Engine, PassResult
from forkpoint.engine.garbage import defer_collections
from forkpoint.engine.route_replay import RouteReplay
from forkpoint.engine.routing import Routing
from forkpoint.engine.transaction import Transaction
from forkpoint.errors import ForkpointError, RankError
from forkpoint.losses.views import batch_denominators
from forkpoint.parallel.call import run_on_ranks
from forkpoint.plan.lanes import lanes_of, measured_lane
from forkpoint.step.agree import agree
from forkpoint.step.differentiable import Differentiable, FirstHalf, GivenWeights, Pending
from forkpoint.step.faster_kernels import note_faster_kernels
from forkpoint.step.plan import check_and_plan
from forkpoint.step.request import (
    AgreedStep,
    BackwardRequest,
    ComparedRequest,
    LogprobsRequest,
    Request,
    ScoreRequest,
    StepPolicy,
    TrainRequest,
)
from forkpoint.step.results import Scores, StepStats
from forkpoint.step.router_steps import route_replay
from forkpoint.step.self_check import self_check
from forkpoint.step.weight_changes import Weights

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Executed:
    """Results of the passes of a step, and features with further results."""

    passes: PassResult
    routing: Routing | None
    replay: RouteReplay | None
    own_router_loss: float | None = None
    """This rank's part of the router loss, if no backward has computed it."""


Finish = Callable[[StepPolicy, AgreedStep, Executed], T]
"""Makes the result of a step from the results of its passes."""


def run(policy: StepPolicy, request: Request, finish: Finish[T]) -> T:
    """Run a request. If the device runs out of memory, run it again with a lower memory budget.

    Each run has a transaction. If it raises, all changes are undone, unless the step has succeeded.
    A request is not repeated if the caller passed a plan, if earlier gradients were lost, or if
    there are several ranks.
    """
    before, group, repeats = policy.last_step, policy.host.group, request.plan is None
    work = partial(perform, policy, request, finish)
    while True:
        transaction = Transaction(policy.host.device)
        try:
            if group.ranks.is_alone:
                return transaction.run(work)
            return run_on_ranks(
                group.ranks,
                partial(transaction.run, work),
                lockstep=group.topology.lockstep,
                succeeded=transaction.is_committed,
            )
        except torch.OutOfMemoryError:
            step, budgets = policy.last_step, policy.model_state.budgets
            lost = step is not None and step is not before and step.gradients == "cleared"
            if lost or not repeats or not budgets.lower(policy.host, policy.config):
                raise
            repeats = False


def perform(policy: StepPolicy, request: Request, finish: Finish[T], transaction: Transaction) -> T:
    """Run all stages of a request, within `transaction.run`."""
    defer_collections(transaction.changes)
    policy.host.prepare(transaction.changes)
    local = check_and_plan(policy, request)
    agreed = agree(policy, local)
    if request.announced:
        policy.last_step, transaction.notes = transaction.outcome, True
    executed = execute(policy, agreed, transaction)
    if executed.replay is not None:
        host = policy.host
        executed.replay.gather(host.topology.places, host.links, host.routers)
    return finish(policy, agreed, executed)


# Execution
# ------------------------------------------------------------


def execute(policy: StepPolicy, agreed: AgreedStep, transaction: Transaction) -> Executed:
    """Run the self-check, if it is due, and the passes of the step."""
    _check_sample(policy, agreed, transaction)
    local, request = agreed.local, agreed.local.request
    engine = _engine(policy, agreed, transaction)
    if isinstance(request, ScoreRequest):
        return _score(engine, agreed, request)
    note_faster_kernels(agreed.plan, policy.host.device, policy.config.attention_kernel)
    if isinstance(request, BackwardRequest):
        result = engine.backward(request.weights, request.first.check_values)
    else:
        assert isinstance(request, TrainRequest) and local.loss is not None
        counts = request.denominators or agreed.denominators or batch_denominators(local.batch)
        result = engine.forward_backward(local.loss, counts, local.scale)
    return Executed(result, engine.routing, engine.replay)


def _engine(policy: StepPolicy, agreed: AgreedStep, transaction: Transaction) -> Engine:
    """Make the engine of a step, with the features that its request and its ranks need."""
    host, local, plan = policy.host, agreed.local, agreed.plan
    request, work = local.request, local.routers
    forced = request.replay if isinstance(request, ComparedRequest) else None
    routing = None
    if work is not None:
        sums = request.scores and request.router is not None
        routing = Routing(plan, host, host.routers, work.terms, agreed.statistics, sums=sums)
    return Engine(
        host,
        policy.config,
        transaction,
        plan,
        local.batch,
        policy.model_state.staging_of(plan, host, policy.config, training=not request.scores),
        ranks=agreed.ranks,
        routing=routing,
        replay=forced or route_replay(host, plan, local.batch),
        exchange=agreed.exchange,
        encoders=agreed.encoders,
    )


def _score(engine: Engine, agreed: AgreedStep, request: ScoreRequest) -> Executed:
    """Run a pass of scores, and end it on all ranks."""
    routing, own = engine.routing, None
    result = engine.score(entropy=request.entropy, program=agreed.program)
    if routing is not None and routing.sums:
        routing.gather(agreed.ranks)
        own = float(routing.value())
    ending = None if routing is None else partial(routing.ending, own)
    agreed.ranks.finish(torch.zeros(()), None, gradients=False, router=ending)
    return Executed(result, routing, engine.replay, own)


def _check_sample(policy: StepPolicy, agreed: AgreedStep, transaction: Transaction) -> None:
    """Run the self-check on a sample, if it is due. Collective.

    Then set the agreed gathering of weights.
    """
    host, holder, local, sample = policy.host, policy.host.group, agreed.local, agreed.sample
    if sample is not None:
        error: ForkpointError | None = None
        training = local.request.training
        try:
            error = self_check(transaction, host, policy.config, sample, training=training).fault()
            if error is None and local.checked is not None:
                checked = local.checked._replace(encodes=bool(sample.media))
                policy.model_state.checks.passed(checked)
        except RankError:  # of another rank, and known to all
            raise
        except ForkpointError as caught:
            if holder.topology.lockstep:
                # The error arose within forwards. If only this rank has it, the others wait in
                # collectives of the forwards, and do not reach the exchange below.
                agreed.ranks.ranks.may_be_missed(caught)
            error = caught
        holder.reshard()
        agreed.ranks.same(error)
    if agreed.gather is not None:
        holder.use(agreed.gather, transaction.changes)


# Results
# ------------------------------------------------------------


def finish_training(policy: StepPolicy, agreed: AgreedStep, executed: Executed) -> StepStats:
    """Make the result of `forward_backward`."""
    result, plan, device = executed.passes, agreed.plan, policy.host.device
    routing, replay, end = executed.routing, executed.replay, agreed.ranks.router
    # Errors of the device are raised here at the latest, because this waits for the loss.
    batch, objective = agreed.local.batch, agreed.local.loss
    assert objective is not None
    loss = policy.model_state.ratios.read(result.loss, result.per_token.get("logprobs"), batch)
    if routing is not None and policy.host.entry.counts.kept:
        policy.host.add_counts(routing.counts().logical_LE)
    router_loss = None
    if routing is not None and agreed.local.request.router is not None:
        router_loss = float(routing.loss) if end is None else end.loss
    lanes = None
    if plan.pipeline is not None:
        own = measured_lane(result.events, result.event_ms, result.event_wait_ms)
        lanes = lanes_of(plan, policy.host.links.exchange(own))
    return StepStats(
        loss=loss,
        logical_tokens=plan.logical_tokens,
        unique_tokens=plan.unique_tokens,
        computed_tokens=plan.computed_tokens,
        plan=plan,
        events=result.events,
        phase_ms=result.phase_ms,
        event_ms=result.event_ms,
        peak_memory_bytes=(
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        ),
        per_token={name: x_T.detach() for name, x_T in result.per_token.items()},
        batch=batch,
        objective=objective,
        offload=result.offload,
        router_loss=router_loss,
        experts=routing.counts(end) if routing else None,
        routes=replay.routes if replay else None,
        lanes=lanes,
    )


def finish_scores(policy: StepPolicy, agreed: AgreedStep, executed: Executed) -> Scores:
    """Make the result of `score`."""
    result, own = executed.passes, executed.own_router_loss
    routing, replay, end = executed.routing, executed.replay, agreed.ranks.router
    return Scores(
        result.per_token,
        agreed.plan,
        result.events,
        router_loss=own if own is None or end is None else end.loss,
        own_router_loss=own,
        experts=routing.counts(end) if routing else None,
        routes=replay.routes if replay else None,
    )


# Log-probs with a backward
# ------------------------------------------------------------


def logprobs(policy: StepPolicy, request: ScoreRequest) -> tuple[Tensor, ...]:
    """Compute log-probs [T] (and entropies) of a batch; with a graph for a `LogprobsRequest`.

    Their backward runs the plan again, at the end of the user's backward.
    """
    agreed, executed = run(policy, request, lambda _, agreed, executed: (agreed, executed))
    host, per_token = policy.host, executed.passes.per_token
    names = (host.head, "entropies") if request.entropy else (host.head,)
    values = tuple(per_token[name] for name in names)
    settings = agreed.local.settings
    if not isinstance(request, LogprobsRequest) or settings is None:
        return values
    first = FirstHalf(
        agreed.local.batch,
        agreed.plan,
        per_token[host.head],
        host.compute_dtype,
        settings,
        Weights(host.named_parameters(), host.named_buffers()),
    )

    backward = partial(_run_backward, policy, first)
    pending = Pending(names, first, backward, listens=host.topology.listens)
    return Differentiable.apply(pending, len(values), *values, *pending.leaves)


def _run_backward(policy: StepPolicy, first: FirstHalf, weights: GivenWeights) -> None:
    """Run the second half of `logprobs`, with gradients of its values as weights."""
    request = BackwardRequest(batch=first.batch, plan=first.plan, first=first, weights=weights)
    run(policy, request, _finish_backward)


def _finish_backward(policy: StepPolicy, agreed: AgreedStep, executed: Executed) -> None:
    if policy.host.device.type == "cuda":
        torch.cuda.synchronize(policy.host.device)  # an error of the device is raised here
