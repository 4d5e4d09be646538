"""Comparison of every parameter's gradient between steps that share and ordinary training.

Both are compared with ordinary training in higher precision, the reference. In 16 bits sharing may
be no further from the reference than ordinary training is.
"""

import gc
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.engine.gradients import twins
from forkpoint.engine.host import FoundRouter
from forkpoint.engine.route_replay import ForcedRoutes, RouteReplay
from forkpoint.engine.timing import Event
from forkpoint.engine.transaction import Transaction
from forkpoint.errors import PlanError
from forkpoint.hosts.libraries import stock_of, whole_copy
from forkpoint.hosts.modules import forget_lists
from forkpoint.losses.base import Denominators, Loss, check_denominators
from forkpoint.losses.router import RouterLoss
from forkpoint.losses.views import check_range
from forkpoint.plan.runs import labels_run
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.request import ComparedRequest, StepPolicy
from forkpoint.step.results import StepStats
from forkpoint.step.router_steps import RouterWork, check_averaged, router_work
from forkpoint.step.run import attempt, finish_training
from forkpoint.tree.forest import IntArray
from forkpoint.verify.dense import DenseRouters, DenseRun, dense_run
from forkpoint.verify.memory import (
    DENSE_STRATEGIES,
    REFERENCE_STRATEGIES,
    MemoryStrategy,
    has_room,
    run_in_memory,
)
from forkpoint.verify.plans import Choice, Compared, Planning, choose_plans, count_shared
from forkpoint.verify.progress import Clock
from forkpoint.verify.progress import VerifyProgress as VerifyProgress
from forkpoint.verify.ranks import RankComm, rank_comm
from forkpoint.verify.report import FAILED, PASSED, nothing_to_verify
from forkpoint.verify.report import ParameterError as ParameterError
from forkpoint.verify.report import PlanFindings as PlanFindings
from forkpoint.verify.report import VerifyReport as VerifyReport
from forkpoint.verify.routes import HeldRoutes

T = TypeVar("T")
Gradients = Mapping[str, Tensor | None]

SMALLER_TRIED = 2
"""Smaller plans that are tried, one after the other, where memory runs out."""
LOWERED = 0.7
"""The part of a predicted peak that is tried next where it was too much."""

REFERENCE, DENSE = "reference", "dense"
"""Names of the runs of single rollouts."""

OVERALL_RATIO = 1.1
WORST_RATIO = 1.5
FLOAT64_BAR = 1e-10
# An error is one draw of rounding, and where dense happened to draw a small one, a ratio to it says
# little. So units in the last place are allowed on top: of the gradient of each parameter, and of
# the gradient as a whole, where draws average out.
PARAMETER_ULPS = {torch.float32: 8.0, torch.bfloat16: 1 / 4, torch.float16: 1 / 4}
OVERALL_ULPS = {torch.float32: 8.0, torch.bfloat16: 1 / 16, torch.float16: 1 / 16}
# A parameter whose gradient is less than this part of the others' is measured by that part: a
# gradient that cancels to nearly nothing is all rounding.
LEAST_PART = 0.01
PIECE_ELEMENTS = 1 << 24
"""Elements of a gradient that are compared at a time."""


@dataclass(frozen=True)
class Reference:
    """The reference, and how far ordinary training is from it."""

    run: DenseRun
    norms: dict[str, float]
    dense_errors: dict[str, float]


class Stepping(Planning, StepPolicy, Protocol):
    """A policy whose steps are compared: see `forkpoint.Policy`."""

    def with_config(self, **changes: object) -> "Stepping": ...


@dataclass
class Work:
    """One comparison: its arguments, and what all its runs use."""

    policy: Stepping
    batch: RolloutBatch
    loss: Loss
    denominators: Denominators
    given: Denominators | None
    """By the caller."""
    changes: Changes
    dtype: torch.dtype
    reference_dtype: torch.dtype
    comm: RankComm
    routed: RouterWork | None
    """Of the loss of routers; None where there is none."""
    others: tuple[Tensor, ...] = ()
    """Leaves that the loss reads and that are no parameters of the model, once the reference has
    run."""
    held: HeldRoutes = field(init=False)
    clock: Clock = field(init=False)

    @property
    def double(self) -> bool:
        """Whether the model is its own reference."""
        return self.dtype == torch.float64

    @property
    def router(self) -> RouterLoss | None:
        """The loss of routers."""
        return None if self.routed is None else self.routed.router

    @property
    def last_tokens(self) -> bool:
        """Whether rollouts' last tokens run."""
        return self.router is not None and self.router.last_token

    def dense_routers(self, model: nn.Module) -> DenseRouters | None:
        """The same loss in ordinary training of the model or of a copy of it."""
        if self.routed is None:
            return None
        host = self.policy.host
        names = {module: name for name, module in host.model.named_modules()}
        found = [names[router.module] for router in host.routers.found]
        return DenseRouters(
            [FoundRouter(name, model.get_submodule(name)) for name in found],
            self.routed.terms,
            self.changes,
            last_token=self.last_tokens,
            joins=self.routed.joins,
            gather=self.comm.gather if self.routed.on_ranks else None,
        )


def _clock(work: Work, choice: Choice, progress: Callable[[VerifyProgress], None] | None) -> Clock:
    """The runs to come, with their work."""
    tokens = float(work.batch.logical_tokens)
    # Log-probs first, then a forward and a backward of twice its work.
    runs = {REFERENCE: 4 * tokens} | ({} if work.double else {DENSE: 4 * tokens})
    runs |= {entry.kind: 3.0 * entry.counts.computed_tokens for entry in choice.compared}
    return Clock(runs, progress)


def verify(
    policy: Stepping,
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None = None,
    *,
    router: RouterLoss | None = None,
    hold_routes: bool = True,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> VerifyReport:
    """Compare steps that share with ordinary training, and both with higher precision.

    Two plans are compared, within the policy's options: one that shares within microbatches, and
    one whose microbatches read by prefix cache what others have shared; and the planner's own where
    it is neither. Where one microbatch would hold everything, microbatches are made shorter. The
    verdict is that of all. A batch of which nothing can be shared is called "nothing to verify",
    and nothing is run.

    The reference is the stock model run densely, without forkpoint's code, in float32 for 16-bit
    models and float64 for float32 models; it needs a copy of the model. Over all parameters the
    shared error may be 1.1 times the dense run's own, for each parameter 1.5 times (somewhat more
    for those of few elements, by whose norm chance shows), both plus rounding. A float64 model is
    its own reference, with upcasts to float32 lifted: every gradient must agree within 1e-10 of the
    global gradient norm, the loss and every log-prob (of a critic, value) within 1e-10.

    The routers of a mixture of experts in float32 or 16 bits are forced to choose the experts that
    the reference chose, on both sides (`forkpoint.engine.route_replay`); `VerifyReport.routes` has
    how many choices would have been others, or why they could not be forced. With `hold_routes`
    False each run chooses for itself, as training does, and the bars are then no question of
    sharing alone. With `router`, which is its loss of routers, gradients are those of both losses,
    and the values of the router loss are compared as those of the loss are.

    Where memory runs out on CUDA, runs are repeated in ways that take less of it
    (`forkpoint.verify.memory`). `progress` is called with how far the work is.

    Raises as `Policy.forward_backward`.
    """
    work = partial(
        _verify,
        policy,
        batch,
        loss,
        denominators,
        router=router,
        hold_routes=hold_routes,
        progress=progress,
    )
    return Transaction(policy.host.device).run(work)


def _verify(
    policy: Stepping,
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None,
    transaction: Transaction,
    router: RouterLoss | None,
    hold_routes: bool,
    progress: Callable[[VerifyProgress], None] | None,
) -> VerifyReport:
    host, changes = policy.host, transaction.changes
    comm = rank_comm(host.group, loss)
    host.prepare(changes)
    dtype = host.compute_dtype
    reference_dtype = torch.float32 if dtype.itemsize < 4 else torch.float64
    for p in host.model.parameters():
        changes.later(setattr, p, "grad", p.grad)
        p.grad = None

    def check_and_plan() -> tuple[RouterWork | None, Choice]:
        # What a step refuses is refused before anything runs.
        loss.check_head(host.head)
        if len(batch):
            loss.check(batch)
        check_range(batch, host.loss_dtype)
        check_denominators(denominators)
        host.check(batch, training=True, routed=router is not None)
        work = router_work(host, batch, router)
        if work is not None:
            check_averaged(host.group, loss)
        return work, choose_plans(policy, batch, loss, router)

    routed, choice = comm.run(check_and_plan)
    comm.check_routers(router, routed)
    choice = comm.choice(choice, policy, batch, loss, router)
    described = {
        "dtype": str(dtype).removeprefix("torch."),
        "reference_dtype": str(reference_dtype).removeprefix("torch."),
        "head": host.head,
        "left_out": choice.left_out,
        "asked": (policy.config.sharing, policy.config.boundary),
        "logical_tokens": comm.tokens(batch.logical_tokens),
    }
    if choice.reason is not None:
        return nothing_to_verify(reason=choice.reason, **described)
    counted = denominators or comm.denominators(batch)
    work = Work(
        policy, batch, loss, counted, denominators, changes, dtype, reference_dtype, comm, routed
    )
    work.held = HeldRoutes(
        host,
        batch,
        changes,
        hold=hold_routes,
        needed=not work.double,
        last_tokens=work.last_tokens,
    )
    work.clock = _clock(work, choice, progress)
    if work.double:
        stock_of(host.model).compute_in(dtype, changes)
    with torch.enable_grad():
        run = _reference(work, _reference_strategies(work))
        if work.double:
            dense, dense_routes = run, None
            dense_errors = dict.fromkeys(run.gradients, 0.0)
        else:
            dense, dense_routes = _dense(work, DENSE_STRATEGIES)
            dense_errors = distances(dense.gradients, run.gradients)
            dense = replace(dense, gradients={})
        norms = {n: norm_of(gradient) for n, gradient in run.gradients.items()}
        reference = Reference(run, norms, dense_errors)
        plans = tuple(_findings(work, entry, reference, dense_routes) for entry in choice.compared)
    norm = math.hypot(*norms.values()) or 1.0
    head = host.head
    return VerifyReport(
        verdict=PASSED if all(plan.passed for plan in plans) else FAILED,
        plans=plans,
        reason=None,
        dense_error=math.hypot(*dense_errors.values()) / norm,
        dense_loss_difference=dense.loss - run.loss,
        dense_router_loss_difference=_difference(dense.router_loss, run.router_loss),
        dense_logprob_difference=comm.most(_largest(dense.per_token[head] - run.per_token[head])),
        **described,
    )


def _findings(
    work: Work, entry: Compared, reference: Reference, dense_routes: ForcedRoutes | None
) -> PlanFindings:
    """Run one plan, and compare it."""
    policy, dtype, wanted = work.policy, work.dtype, reference.run
    model, head = policy.host.model, policy.host.head
    shared, stats, run = _in_memory(work, entry)
    comm = work.comm
    shared_errors = distances(shared, wanted.gradients)
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    elements |= named({leaf: leaf.numel() for leaf in work.others})
    errors = parameter_errors(elements, dtype, shared_errors, reference)
    del shared
    _clear_gradients(model)
    work.clock.at(entry.kind, 1.0)
    norm = math.hypot(*reference.norms.values()) or 1.0
    shared_error = math.hypot(*(e.shared_error for e in errors)) / norm
    dense_error = math.hypot(*reference.dense_errors.values()) / norm
    loss_difference = stats.loss - wanted.loss
    wanted_T = wanted.per_token[head]
    # Log-probs of what the plan leaves out are NaN. That it has no gradient is compared above.
    run_T = torch.from_numpy(labels_run(work.batch.offsets, stats.plan.run_lengths))
    difference = comm.most(_largest((stats.per_token[head] - wanted_T)[run_T.to(wanted_T.device)]))
    if work.double:
        allowed = FLOAT64_BAR
        loss_error = comm.most(abs(loss_difference) / max(1.0, abs(wanted.loss)))
        # Values of a critic have any scale.
        scale = comm.most(max(1.0, _largest(wanted_T))) if head == "values" else 1.0
        aside = _difference(stats.router_loss, wanted.router_loss)
        if aside is not None:
            loss_error = max(loss_error, abs(aside) / max(1.0, abs(wanted.router_loss or 0.0)))
        values_pass = max(loss_error, difference / scale) <= FLOAT64_BAR
    else:
        allowed = OVERALL_RATIO * dense_error + OVERALL_ULPS[dtype] * torch.finfo(dtype).eps
        values_pass = True
    return PlanFindings(
        kind=entry.kind,
        passed=comm.every(
            shared_error <= allowed and all(e.excess <= 1 for e in errors) and values_pass
        ),
        sharing=stats.plan.sharing,
        boundary=stats.plan.boundary,
        max_microbatch_tokens=stats.plan.max_microbatch_tokens,
        # Of the plan that ran, whichever was to run.
        counts=comm.counts(count_shared(stats.plan)),
        shared_error=shared_error,
        allowed=allowed,
        worst=tuple(sorted(errors, key=lambda e: -e.excess)),
        loss_difference=loss_difference,
        router_loss_difference=_difference(stats.router_loss, wanted.router_loss),
        logprob_difference=difference,
        routes=work.held.report(run, dense_routes),
    )


def _in_memory(work: Work, entry: Compared) -> tuple[Gradients, StepStats, RouteReplay | None]:
    """Run one plan or, where memory runs out, one of the same kind that is predicted to need
    less."""
    policy, mark = work.policy, work.changes.mark
    tried = 0
    while True:
        run = work.held.replay(entry.plan)
        work.clock.at(entry.kind, 0.0)
        try:
            return *_shared(work, entry, run), run
        except torch.OutOfMemoryError as error:
            if tried == SMALLER_TRIED or policy.host.group is not None:
                raise  # ranks would have to try the same
            peak = int(LOWERED * (entry.plan.predicted_peak_bytes or 0))
            smaller = policy.with_config(memory_budget=max(1, peak), checkpointing="full")
            try:
                choice = choose_plans(smaller, work.batch, work.loss, work.router)
                entry = next(other for other in choice.compared if other.kind == entry.kind)
            except (PlanError, StopIteration):
                raise error from None
            traceback.clear_frames(error.__traceback__)
        finally:
            work.changes.undo(mark)
        tried += 1
        _clear_gradients(policy.host.model)
        torch.cuda.empty_cache()


def _shared(work: Work, entry: Compared, run: RouteReplay | None) -> tuple[Gradients, StepStats]:
    """Run one plan; its gradients are those of the model."""
    policy, batch, plan = work.policy, work.batch, entry.plan
    # It compares more than a sample does.
    unchecked = policy.with_config(self_check=False)
    whole, done = len(plan.events()) or 1, 0

    def observe(event: Event) -> None:
        nonlocal done
        work.clock.at(entry.kind, done / whole)
        done += 1
        if policy.observer is not None:
            policy.observer(event)

    unchecked.observer = observe
    for leaf in work.others:
        work.changes.later(setattr, leaf, "grad", leaf.grad)
        leaf.grad = None
    given, loss = work.given, work.loss
    request = ComparedRequest(
        batch=batch,
        loss=loss,
        denominators=given,
        plan=plan,
        router=work.router,
        replay=run,
    )
    transaction = Transaction(policy.host.device)
    stats = attempt(unchecked, request, finish_training, transaction)
    others = named({leaf: leaf.grad for leaf in work.others})
    return work.comm.gradients(policy.host.model, others), stats


def _dense(
    work: Work, strategies: tuple[MemoryStrategy, ...]
) -> tuple[DenseRun, ForcedRoutes | None]:
    """Run the model itself densely."""
    host, changes = work.policy.host, work.changes
    mark = changes.mark
    model, blocks = host.model, host.blocks
    if not work.comm.whole:
        model, blocks = _copy(work, work.dtype)

    def run(strategy: MemoryStrategy) -> tuple[DenseRun, ForcedRoutes | None]:
        strategy.apply(blocks, host.device, changes)
        routed = work.held.run(model)
        return _single_rollouts(work, DENSE, model, routed, strategy), routed

    def undo() -> None:
        changes.undo(mark)
        forget_lists()

    found, routed = work.comm.run(lambda: run_in_memory(strategies, run, undo))
    undo()
    found = work.comm.total(found, host.model, work.dtype)
    found.gradients.update(named({leaf: found.besides.get(leaf) for leaf in work.others}))
    return found, routed


def _reference_strategies(work: Work) -> tuple[MemoryStrategy, ...]:
    host = work.policy.host
    if work.double:  # its own reference, which is nowhere else
        return REFERENCE_STRATEGIES[:-1]
    if not has_room(host.model, work.reference_dtype, host.device):
        return REFERENCE_STRATEGIES[-1:]
    # Copies that ranks make together are made once.
    return REFERENCE_STRATEGIES if work.comm.whole else REFERENCE_STRATEGIES[:-1]


def _copy(
    work: Work, dtype: torch.dtype, *, streamed: bool = False
) -> tuple[nn.Module, nn.ModuleList]:
    host = work.policy.host
    splits = () if host.group is None else host.group.splits
    return whole_copy(host.model, host.blocks, dtype, streamed=streamed, splits=splits)


def _reference(work: Work, strategies: tuple[MemoryStrategy, ...]) -> DenseRun:
    """Run the reference; its gradients are in the host's memory."""
    host, changes = work.policy.host, work.changes
    mark = changes.mark

    copies = []
    if not work.comm.whole:
        # All ranks copy together, and before anything can fail on one.
        copies.append(_copy(work, work.reference_dtype, streamed=strategies[0].streamed))

    def run(strategy: MemoryStrategy) -> DenseRun:
        model, blocks = copies[0] if copies else (host.model, host.blocks)
        if not copies and not work.double:
            model, blocks = _copy(work, work.reference_dtype, streamed=strategy.streamed)
        if model is not host.model:
            stock_of(model).compute_in(work.reference_dtype, changes)
        strategy.apply(blocks, host.device, changes)
        with torch.autocast(host.device.type, enabled=False):
            routed = None if work.double else work.held.run(model, record=True)
            return _single_rollouts(work, REFERENCE, model, routed, strategy)

    def undo() -> None:
        changes.undo(mark)
        forget_lists()  # which would keep the copy alive until the end

    found = work.comm.run(lambda: run_in_memory(strategies, run, undo))
    copies.clear()
    undo()
    found = work.comm.total(found, host.model, work.reference_dtype)
    work.others = tuple(found.besides)
    found.gradients.update(named(found.besides))
    for name, gradient in found.gradients.items():
        if gradient is not None:
            found.gradients[name] = gradient.cpu()
    if host.device.type == "cuda":
        gc.collect()  # the copy, whose modules refer to one another
        torch.cuda.empty_cache()
    return found


def _single_rollouts(
    work: Work, name: str, model: nn.Module, routed: ForcedRoutes | None, strategy: MemoryStrategy
) -> DenseRun:
    """Run rollouts one at a time, without forkpoint's code, and say how far that is."""
    batch, routers = work.batch, work.dense_routers(model)
    if not len(batch):
        head = work.policy.host.head
        nothing = torch.zeros(0, dtype=work.policy.host.loss_dtype, device=work.policy.host.device)
        aside = None
        if routers is not None:
            routers.counted()
            aside = routers.value()
        none: dict[str, Tensor | None] = {name: None for name, _ in model.named_parameters()}
        return DenseRun(0.0, {head: nothing}, none, router_loss=aside)
    # Each comes twice: log-probs, then a forward and a backward.
    tokens_run = int((batch.lengths - (not work.last_tokens)).sum())
    done, calls, whole = 0, 0, 4 * tokens_run or 1
    work.clock.at(name, 0.0)

    def entering(tokens: IntArray) -> None:
        nonlocal done, calls
        work.clock.at(name, done / whole)
        done += len(tokens) * (1 if calls < len(batch) else 3)
        calls += 1
        if routed is not None:
            routed.at(tokens)

    host = work.policy.host
    with Changes() as changes:
        if model is host.model and host.topology.listens:
            twins(model, [p for p in model.parameters() if p.requires_grad], changes)
        found = dense_run(
            model,
            batch,
            work.loss,
            work.denominators,
            entering,
            head_tokens=strategy.head_tokens,
            routers=routers,
        )
    work.clock.at(name, 1.0)
    return found


def _difference(value: float | None, wanted: float | None) -> float | None:
    return None if value is None or wanted is None else value - wanted


def _largest(values_T: Tensor) -> float:
    return float(values_T.abs().max()) if len(values_T) else 0.0


def _clear_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def distances(found: Gradients, wanted: Gradients) -> dict[str, float]:
    """By parameter, how far gradients are from others."""
    return {name: distance_of(found[name], other) for name, other in wanted.items()}


def parameter_errors(
    elements: Mapping[str, int],
    dtype: torch.dtype,
    shared_errors: Mapping[str, float],
    reference: Reference,
) -> list[ParameterError]:
    """`elements`: of each parameter and other leaf, by name."""
    norms = reference.norms
    total = math.hypot(*norms.values())
    typical = total / math.sqrt(max(1, sum(norm > 0 for norm in norms.values())))
    errors = []
    for name, count in elements.items():
        dense_error = reference.dense_errors[name]
        if dtype == torch.float64:
            allowed = FLOAT64_BAR * total
        else:
            few = 1 + 2 / math.sqrt(count)
            ulp = torch.finfo(dtype).eps * max(norms[name], LEAST_PART * typical)
            allowed = WORST_RATIO * few * dense_error + PARAMETER_ULPS[dtype] * ulp
        errors.append(ParameterError(name, norms[name], shared_errors[name], dense_error, allowed))
    return errors


def named(of_leaves: Mapping[Tensor, T]) -> dict[str, T]:
    """Values of leaves that are no parameters of the model, by names for a report."""
    return {
        f"leaf {number} of the loss, {tuple(leaf.shape)}": value
        for number, (leaf, value) in enumerate(of_leaves.items())
    }


def _pieces(gradient: Tensor) -> Iterator[Tensor]:
    """Flat pieces, so that copies in double precision stay small beside the largest parameter."""
    return iter(gradient.detach().reshape(-1).split(PIECE_ELEMENTS))


def norm_of(gradient: Tensor | None) -> float:
    if gradient is None:
        return 0.0
    return math.hypot(*(float(piece.double().norm()) for piece in _pieces(gradient)))


def distance_of(gradient: Tensor | None, wanted: Tensor | None) -> float:
    if gradient is None or wanted is None:
        present = gradient if wanted is None else wanted
        return norm_of(present)
    pieces = zip(_pieces(gradient), _pieces(wanted), strict=True)
    return math.hypot(*(float((g.double() - t.to(g.device).double()).norm()) for g, t in pieces))
