"""Comparison of the gradients of all parameters between steps that share and ordinary training.

The reference is ordinary training in higher precision. In 16 bits, errors of steps that share must
not exceed those of ordinary training, relative to the reference.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.engine.gradients import twins
from forkpoint.engine.route_replay import ForcedRoutes, RouteReplay, Routes
from forkpoint.engine.transaction import Transaction
from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.libraries import routers_of, stock_of, whole_copy
from forkpoint.hosts.modules import forget_lists
from forkpoint.hosts.routers import force_routers, routers_of_copy
from forkpoint.hosts.torch_dist.copies import full
from forkpoint.losses.base import Denominators, Loss, check_denominators
from forkpoint.losses.router import RouterLoss
from forkpoint.losses.views import check_range
from forkpoint.plan import Plan
from forkpoint.plan.runs import labels_run
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.request import ComparedRequest, StepPolicy
from forkpoint.step.results import StepStats
from forkpoint.step.router_steps import RouterWork, check_averaged, router_work
from forkpoint.step.run import finish_training, run
from forkpoint.verify.dense import DenseRouters, DenseRun, dense_run
from forkpoint.verify.memory import PLAIN, SMALL, STREAMED, MemoryStrategy, has_room, run_in_memory
from forkpoint.verify.plans import Choice, Kind, choose_plans, count_shared
from forkpoint.verify.ranks import RankComm
from forkpoint.verify.report import FAILED, NOTHING, PASSED, RouteCounts, RouteReport
from forkpoint.verify.report import ParameterError as ParameterError
from forkpoint.verify.report import PlanFindings as PlanFindings
from forkpoint.verify.report import VerifyReport as VerifyReport

Gradients = Mapping[str, Tensor | None]

REFERENCE, DENSE = "reference", "dense"
"""Names of the runs of single rollouts, for `progress`."""

OVERALL_RATIO = 1.1
WORST_RATIO = 1.5
FLOAT64_BAR = 1e-10
# Rounding errors are random, and the error of the dense run may be small by chance. So additional
# units in the last place are allowed: for the gradient of each parameter, and for the whole
# gradient, in which errors average out. float32 errors differ between processors: matrix products
# give small models 0.5 to 2 times the error.
PARAMETER_ULPS = {torch.float32: 24.0, torch.bfloat16: 1 / 4, torch.float16: 1 / 4}
OVERALL_ULPS = {torch.float32: 16.0, torch.bfloat16: 1 / 16, torch.float16: 1 / 16}
# If the gradient of a parameter is smaller than this part of the others', its error is relative to
# that part, because a gradient that nearly cancels consists of rounding errors.
LEAST_PART = 0.01
PIECE_ELEMENTS = 1 << 24
"""Number of elements of a gradient that are compared at a time."""


@dataclass(frozen=True)
class Reference:
    """Gradients of the reference, and the errors of the dense run."""

    run: DenseRun
    norms: dict[str, float]
    dense_errors: dict[str, float]

    @property
    def norm(self) -> float:
        """Norm of the whole reference gradient. Errors are relative to it."""
        return math.hypot(*self.norms.values()) or 1.0

    @property
    def dense_error(self) -> float:
        return math.hypot(*self.dense_errors.values()) / self.norm


def verify(
    policy: StepPolicy,
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None = None,
    *,
    router: RouterLoss | None = None,
    hold_routes: bool = True,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Compare steps that share with ordinary training, and both with higher precision.

    The reference is the stock model without sharing and without forkpoint's code, in float32 for
    16-bit models and float64 for float32 models. It needs a copy of the model. The shared error may
    be 1.1 times that of the dense run over all parameters, and 1.5 times for each parameter (more
    for those of few elements, whose norms vary by chance), both plus rounding. A float64 model is
    its own reference, with upcasts to float32 lifted. Its gradients must agree within 1e-10 of the
    global gradient norm, and the loss and every log-prob (value for a critic) within 1e-10.

    In float32 and 16 bits, the routers of a mixture of experts use the experts that the reference
    chose, in all runs (`forkpoint.engine.route_replay`). `PlanFindings.routes` counts the tokens
    for which a run would choose other experts, or has the reason why routes were not fixed. With
    `hold_routes=False` each run chooses its experts, and errors include those of different routes.
    With `router`, gradients are those of both losses, and values of the router loss are compared
    too.

    If memory runs out on CUDA, runs of single rollouts are repeated in ways that take less memory
    (`forkpoint.verify.memory`).

    Arguments and errors are those of `Policy.verify`.
    """

    def work(transaction: Transaction) -> VerifyReport:
        comparison = Comparison(policy, batch, loss, denominators, router, transaction.changes)
        return comparison.report(hold_routes=hold_routes, progress=progress)

    return Transaction(policy.host.device).run(work)


@dataclass(eq=False)
class Comparison:
    """One comparison, with its arguments and the state that its runs share."""

    policy: StepPolicy
    batch: RolloutBatch
    loss: Loss
    given: Denominators | None
    """Denominators of the caller."""
    router: RouterLoss | None
    changes: Changes
    routes: Routes | None = field(init=False)
    """Experts that the reference chose, which other runs use too; None if each run chooses its
    experts."""
    not_held: str | None = field(init=False)
    """Reason why each run chooses its experts; None otherwise, and for models without experts."""
    routed: RouterWork | None = field(init=False)
    denominators: Denominators = field(init=False)
    """Denominators of the loss, over all ranks."""

    def __post_init__(self) -> None:
        self.host: ModelHost = self.policy.host
        self.comm: RankComm = RankComm(self.host.group, self.loss, self.host.links)
        self.host.prepare(self.changes)
        self.dtype: torch.dtype = self.host.compute_dtype
        self.reference_dtype: torch.dtype = (
            torch.float32 if self.dtype.itemsize < 4 else torch.float64
        )
        self.double: bool = self.dtype == torch.float64
        """Whether the model is its own reference."""
        self.last_tokens: bool = self.router is not None and self.router.last_token
        """Whether last tokens of rollouts run."""

    def report(self, *, hold_routes: bool, progress: Callable[[str], None] | None) -> VerifyReport:
        host, comm, batch = self.host, self.comm, self.batch
        for p in host.model.parameters():
            self.changes.set_through(p, "grad", None)
        routed, choice = comm.run(self._check_and_plan)
        comm.check_routers(self.router, routed)
        choice = comm.choice(choice, self.policy, batch, self.loss, self.router)
        nothing = VerifyReport(
            verdict=NOTHING,
            dtype=str(self.dtype).removeprefix("torch."),
            reference_dtype=str(self.reference_dtype).removeprefix("torch."),
            head=host.head,
            left_out=choice.left_out,
            asked=(self.policy.config.sharing, self.policy.config.boundary),
            logical_tokens=comm.tokens(batch.logical_tokens),
            reason=choice.reason,
        )
        if choice.reason is not None:
            return nothing
        self.routes, self.not_held = None, self._why_not_held(hold_routes)
        if self.not_held is None and not self.double and host.shape.expert_layers:
            self.routes = Routes.to_record(batch, last_tokens=self.last_tokens)
        names = [REFERENCE, *([] if self.double else [DENSE]), *choice.plans]
        begin = partial(_announce, progress, names)
        if self.double:
            stock_of(host.model).compute_in(self.dtype, self.changes)
        self.routed, self.denominators = routed, self.given or comm.denominators(batch)
        with torch.enable_grad():
            begin(REFERENCE)
            run, _ = self.single_runs(self.reference_dtype, is_reference=True)
            norms = comm.of_stages({n: norm_of(grad) for n, grad in run.gradients.items()})
            dense, routes, errors = run, None, dict.fromkeys(norms, 0.0)
            if not self.double:
                begin(DENSE)
                dense, routes = self.single_runs(self.dtype, is_reference=False)
                errors = comm.of_stages(distances(dense.gradients, run.gradients))
                dense = replace(dense, gradients={})
            reference = Reference(run, norms, errors)
            plans: list[PlanFindings] = []
            for kind, plan in choice.plans.items():
                begin(kind)
                plans.append(self._findings(kind, plan, reference, routes))
        head = host.head
        return replace(
            nothing,
            verdict=PASSED if all(plan.passed for plan in plans) else FAILED,
            plans=tuple(plans),
            dense_error=reference.dense_error,
            dense_router_loss_difference=_difference(dense.router_loss, run.router_loss),
            dense_logprob_difference=comm.most(
                _largest(dense.per_token[head] - run.per_token[head])
            ),
        )

    def _check_and_plan(self) -> tuple[RouterWork | None, Choice]:
        """Run the checks of a step, and choose plans, before anything runs."""
        host, batch, loss = self.host, self.batch, self.loss
        loss.check_head(host.head)
        if len(batch):
            loss.check(batch)
        check_range(batch, host.loss_dtype)
        check_denominators(self.given)
        host.check(batch, training=True, routed=self.router is not None)
        routed = router_work(host, batch, self.router)
        if routed is not None:
            check_averaged(host.group, loss)
        return routed, choose_plans(self.policy, batch, loss, self.router)

    # Routes
    # ------------------------------------------------------------

    def _why_not_held(self, hold_routes: bool) -> str | None:
        host = self.host
        if self.double or not host.shape.expert_layers:
            return None
        if not host.group.ranks.is_alone:
            return "several ranks hold the model"
        if not hold_routes:
            return "hold_routes is False"
        if not host.routers.found:
            return "this transformers version does not record the model's routers"
        return None

    def _route_report(
        self, shared: ForcedRoutes | None, dense: ForcedRoutes | None
    ) -> RouteReport | None:
        if self.not_held is not None:
            return RouteReport(held=False, reason=self.not_held, shared=None, dense=None)
        if shared is None or dense is None:
            return None
        counts = (
            RouteCounts(int(run.routes.decisions_L.sum()), int(run.routes.elsewhere_L.sum()))
            for run in (shared, dense)
        )
        return RouteReport(True, None, *counts)

    # Runs of single rollouts
    # ------------------------------------------------------------

    def single_runs(
        self, dtype: torch.dtype, *, is_reference: bool
    ) -> tuple[DenseRun, ForcedRoutes | None]:
        """Run rollouts one at a time in `dtype`. Gradients of the reference are in host memory.

        If memory runs out, the run is repeated with options that take less memory. Collective if
        ranks hold parts of the model: all ranks copy the model together, before any work can fail
        on one rank.
        """
        host, mark, whole = self.host, self.changes.mark, self.comm.whole
        is_wider = dtype != host.compute_dtype
        strategies = self._strategies(dtype, copies=is_reference and (is_wider or not whole))

        def copied(streamed: bool) -> tuple[nn.Module, Sequence[nn.Module]]:
            return whole_copy(
                host.model,
                host.blocks,
                dtype,
                streamed=streamed,
                splits=host.group.splits,
                links=host.links,
            )

        joined = [] if whole else [copied(strategies[0].streamed)]

        def attempt(strategy: MemoryStrategy) -> tuple[DenseRun, ForcedRoutes | None]:
            model, blocks = host.model, host.blocks
            if joined:
                model, blocks = joined[0]
            elif is_wider:
                model, blocks = copied(strategy.streamed)
            if is_reference and model is not host.model:
                stock_of(model).compute_in(dtype, self.changes)
            strategy.apply(blocks, host.device, self.changes)
            autocast = torch.autocast(host.device.type, enabled=False)
            with autocast if is_reference else nullcontext():
                routes = None
                if self.routes is not None:
                    found = host.routers.found
                    routes = ForcedRoutes(self.routes, len(found), host.device, record=is_reference)
                    force_routers(routers_of_copy(found, model), routes.choose, self.changes)
                return self._train(model, routes, strategy), routes

        def undo() -> None:
            self.changes.undo(mark)
            forget_lists()  # which would keep the copy alive

        found, routes = self.comm.run(partial(run_in_memory, strategies, attempt, undo))
        joined.clear()
        undo()
        found = self.comm.total(found, host.model, dtype)
        if is_reference:
            for name, gradient in found.gradients.items():
                if gradient is not None:
                    found.gradients[name] = gradient.cpu()
            if host.device.type == "cuda":
                gc.collect()  # frees the copy, whose modules refer to one another
                torch.cuda.empty_cache()
        return found, routes

    def _strategies(self, dtype: torch.dtype, *, copies: bool) -> tuple[MemoryStrategy, ...]:
        """Strategies in order of decreasing memory. `copies`: whether the run uses a copy of the
        model."""
        found = (PLAIN, SMALL, STREAMED) if copies and self.comm.whole else (PLAIN, SMALL)
        if copies and not has_room(self.host.model, dtype, self.host.device):
            found = (STREAMED,)
        # Ranks exchange counts of experts once in each run, so a run cannot be repeated on one
        # rank.
        return found[-1:] if self.routed is not None and self.routed.on_ranks else found

    def _train(
        self, model: nn.Module, routes: ForcedRoutes | None, strategy: MemoryStrategy
    ) -> DenseRun:
        """Run rollouts one at a time, without the code of steps."""
        host, routed, routers = self.host, self.routed, None
        if routed is not None:
            found = host.routers.found
            routers = DenseRouters(
                routers_of(model) if self.comm.staged else routers_of_copy(found, model),
                routed.terms,
                self.changes,
                last_token=self.last_tokens,
                joins=routed.joins,
                gather=self.comm.gather if routed.on_ranks else None,
            )
        if not len(self.batch):
            nothing = torch.zeros(0, dtype=host.loss_dtype, device=host.device)
            if routers is not None:
                routers.counted()
            none: dict[str, Tensor | None] = {name: None for name, _ in model.named_parameters()}
            return DenseRun(0.0, {host.head: nothing}, none, routers and routers.value())
        with Changes() as changes:
            if model is host.model and host.topology.listens:
                twins(model, [p for p in model.parameters() if p.requires_grad], changes)
            return dense_run(
                model,
                self.batch,
                self.loss,
                self.denominators,
                None if routes is None else routes.at,
                head_tokens=strategy.head_tokens,
                routers=routers,
            )

    # Plans
    # ------------------------------------------------------------

    def _findings(
        self, kind: Kind, plan: Plan, reference: Reference, dense_routes: ForcedRoutes | None
    ) -> PlanFindings:
        host, comm, wanted = self.host, self.comm, reference.run
        mark = self.changes.mark
        try:
            routes = None
            if self.routes is not None:
                layers = len(host.routers.found)
                routes = RouteReplay(self.routes, layers, host.device, plan)
            shared, stats = self._shared(plan, routes)
        finally:
            self.changes.undo(mark)
        shared_errors = comm.of_stages(distances(shared, wanted.gradients))
        elements = comm.of_stages({name: p.numel() for name, p in host.model.named_parameters()})
        errors = parameter_errors(elements, self.dtype, shared_errors, reference)
        del shared
        for p in host.model.parameters():
            p.grad = None
        shared_error = math.hypot(*(e.shared_error for e in errors)) / reference.norm
        loss_difference = stats.loss - wanted.loss
        router_difference = _difference(stats.router_loss, wanted.router_loss)
        wanted_T = wanted.per_token[host.head]
        # Log-probs of rollouts that the plan leaves out are NaN. The comparison above shows that
        # they have no gradient.
        run_T = torch.from_numpy(labels_run(self.batch.offsets, plan.run_lengths))
        off_T = (stats.per_token[host.head] - wanted_T)[run_T.to(wanted_T.device)]
        difference = comm.most(_largest(off_T))
        if self.double:
            allowed = FLOAT64_BAR
            loss_error = comm.most(abs(loss_difference) / max(1.0, abs(wanted.loss)))
            # Values of a critic may have any scale.
            scale = comm.most(max(1.0, _largest(wanted_T))) if host.head == "values" else 1.0
            if router_difference is not None:
                size = max(1.0, abs(wanted.router_loss or 0.0))
                loss_error = max(loss_error, abs(router_difference) / size)
            values_pass = max(loss_error, difference / scale) <= FLOAT64_BAR
        else:
            rounding = OVERALL_ULPS[self.dtype] * torch.finfo(self.dtype).eps
            allowed = OVERALL_RATIO * reference.dense_error + rounding
            values_pass = True
        return PlanFindings(
            kind=kind,
            passed=comm.every(
                shared_error <= allowed and all(e.excess <= 1 for e in errors) and values_pass
            ),
            sharing=plan.sharing,
            boundary=plan.boundary,
            max_microbatch_tokens=plan.max_microbatch_tokens,
            counts=comm.counts(count_shared(plan)),
            shared_error=shared_error,
            allowed=allowed,
            worst=tuple(sorted(errors, key=lambda e: -e.excess)),
            loss_difference=loss_difference,
            router_loss_difference=router_difference,
            logprob_difference=difference,
            routes=self._route_report(routes, dense_routes),
        )

    def _shared(self, plan: Plan, routes: RouteReplay | None) -> tuple[Gradients, StepStats]:
        """Run one plan. Gradients are complete on each rank."""
        unchecked = self.policy.with_config(self_check=False)  # the comparison covers more
        request = ComparedRequest(
            batch=self.batch,
            loss=self.loss,
            denominators=self.given,
            plan=plan,
            router=self.router,
            replay=routes,
        )
        stats = run(unchecked, request, finish_training)
        return {
            name: None if p.grad is None else full(p.grad)
            for name, p in self.host.model.named_parameters()
        }, stats


def _announce(progress: Callable[[str], None] | None, runs: Sequence[str], name: str) -> None:
    if progress is not None:
        progress(f"{name} ({runs.index(name) + 1} of {len(runs)})")


def _difference(value: float | None, wanted: float | None) -> float | None:
    return None if value is None or wanted is None else value - wanted


def _largest(values_T: Tensor) -> float:
    return float(values_T.abs().max()) if len(values_T) else 0.0


def distances(found: Gradients, wanted: Gradients) -> dict[str, float]:
    """Norms of the differences of gradients, by parameter."""
    return {name: distance_of(found[name], other) for name, other in wanted.items()}


def parameter_errors(
    elements: Mapping[str, int],
    dtype: torch.dtype,
    shared_errors: Mapping[str, float],
    reference: Reference,
) -> list[ParameterError]:
    """Errors of all parameters, with the largest error that passes.

    Args:
        elements: number of elements of each parameter, by name.
        dtype: dtype of the step.
        shared_errors: norms of (shared gradient - reference gradient), by name.
        reference: norms and dense errors.
    """
    norms = reference.norms
    total = math.hypot(*norms.values())
    typical = total / math.sqrt(max(1, sum(norm > 0 for norm in norms.values())))
    errors = []
    for name, count in elements.items():
        dense_error = reference.dense_errors[name]
        if dtype == torch.float64:
            allowed = FLOAT64_BAR * total
        else:
            few = 1 + 2 / math.sqrt(max(1, count))
            ulp = torch.finfo(dtype).eps * max(norms[name], LEAST_PART * typical)
            allowed = WORST_RATIO * few * dense_error + PARAMETER_ULPS[dtype] * ulp
        errors.append(ParameterError(name, norms[name], shared_errors[name], dense_error, allowed))
    return errors


def _pieces(gradient: Tensor) -> Iterator[Tensor]:
    """Flat pieces of a tensor, so that copies in double precision are small."""
    return iter(gradient.detach().reshape(-1).split(PIECE_ELEMENTS))


def norm_of(gradient: Tensor | None) -> float:
    if gradient is None:
        return 0.0
    return math.hypot(*(float(piece.double().norm()) for piece in _pieces(gradient)))


def distance_of(gradient: Tensor | None, wanted: Tensor | None) -> float:
    if gradient is None or wanted is None:
        return norm_of(gradient if wanted is None else wanted)
    pieces = zip(_pieces(gradient), _pieces(wanted), strict=True)
    return math.hypot(*(float((g.double() - t.to(g.device).double()).norm()) for g, t in pieces))
