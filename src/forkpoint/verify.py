"""Is it exact on this model and batch? Every parameter's gradient, shared and dense.

Both are compared with ordinary training in higher precision, so that the question has an answer for
16-bit models too: sharing may be no further from the truth than dense training already is.
"""

import copy
import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from forkpoint.dense import DenseRun, dense_run
from forkpoint.engine.changes import Changes
from forkpoint.engine.fallback import run_or_fall_back
from forkpoint.engine.guard import Step
from forkpoint.engine.host import Host
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.routes import Observed, RoutedRun, Router, Routes, find_routers, follow
from forkpoint.hosts.upcasts import lift_upcasts, run_plain_experts, run_plain_recurrences
from forkpoint.losses.base import Denominators, Loss
from forkpoint.plan.plan import Plan
from forkpoint.rollouts import RolloutBatch
from forkpoint.sampler import compute_dtype
from forkpoint.verify_report import ParameterError as ParameterError
from forkpoint.verify_report import RouteCounts as RouteCounts
from forkpoint.verify_report import RouteReport as RouteReport
from forkpoint.verify_report import VerifyReport as VerifyReport

Gradients = dict[str, Tensor | None]

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


class StepFigures(Protocol):
    """The parts of a step that are compared: see `forkpoint.StepStats`."""

    @property
    def loss(self) -> float: ...
    @property
    def per_token(self) -> Mapping[str, Tensor]: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def logical_tokens(self) -> int: ...
    @property
    def computed_tokens(self) -> int: ...


class Stepping(Observed, Protocol):
    """A policy whose steps are compared: see `forkpoint.Policy`."""

    @property
    def host(self) -> Host: ...
    def plan(self, batch: RolloutBatch, loss: Loss | None = None) -> Plan: ...
    def with_config(self, **changes: object) -> "Stepping": ...
    def _run_step(
        self,
        step: Step,
        batch: RolloutBatch,
        loss: Loss,
        denominators: Denominators | None,
        scale: float,
        plan: Plan | None,
        *,
        announced: bool,
    ) -> StepFigures: ...


def verify(
    policy: Stepping,
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None = None,
    *,
    hold_routes: bool = True,
) -> VerifyReport:
    """Compare the policy's step with ordinary training, and both with higher precision.

    The reference is the stock model run densely, without forkpoint's code, in float32 for 16-bit
    models and float64 for float32 models; it needs a copy of the model. Over all parameters the
    shared error may be 1.1 times the dense run's own, for each parameter 1.5 times (somewhat more
    for those of few elements, by whose norm chance shows), both plus rounding. A float64 model is
    its own reference, with upcasts to float32 lifted: every gradient must agree within 1e-10 of the
    global gradient norm, the loss and every log-prob (of a critic, value) within 1e-10.

    A mixture of experts in float32 or 16 bits is held to the experts that the reference chose, on
    both sides (`forkpoint.hosts.routes`); `VerifyReport.routes` has how many choices would have
    been others, or why they could not be held. With `hold_routes` False each run chooses for
    itself, as training does, and the bars are then no question of sharing alone.

    Raises as `Policy.forward_backward`.
    """
    return run_or_fall_back(
        policy.host,
        lambda step: _verify(
            policy, batch, loss, denominators, step.changes, hold_routes=hold_routes
        ),
    )


def _verify(
    policy: Stepping,
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None,
    changes: Changes,
    *,
    hold_routes: bool,
) -> VerifyReport:
    model = policy.host.model
    policy.host.prepare(changes)
    dtype = compute_dtype(model, policy.host.device)
    routes = None
    for p in model.parameters():
        changes.later(setattr, p, "grad", p.grad)
        p.grad = None
    reference_dtype = torch.float64
    if dtype == torch.float64:
        mark = changes.mark
        _run_plainly(model, dtype, changes)
        with torch.enable_grad():
            shared, stats = _shared(policy, batch, loss, denominators, changes)
            dense = reference = dense_run(model, batch, loss, denominators)
        changes.undo(mark)
    else:
        reference_dtype = torch.float64 if dtype == torch.float32 else torch.float32
        # What a step refuses is refused before anything runs.
        loss.check_head(policy.host.head)
        loss.check(batch)
        policy.host.check(batch, training=True)
        plan = policy.plan(batch, loss)
        held = _HeldRoutes(model, batch, changes, hold=hold_routes)
        reference = _reference(policy, batch, loss, denominators, reference_dtype, held, changes)
        with torch.enable_grad():
            mark = changes.mark
            shared_run = held.run(model)
            shared, stats = _shared(policy, batch, loss, denominators, changes, plan, shared_run)
            changes.undo(mark)
            run = held.run(model)
            dense = dense_run(model, batch, loss, denominators, run and run.at)
            changes.undo(mark)
        routes = held.report(shared_run, run)

    errors = _parameter_errors(model, dtype, shared, dense.gradients, reference.gradients)
    norm = math.hypot(*(e.norm for e in errors)) or 1.0
    shared_error = math.hypot(*(e.shared_error for e in errors)) / norm
    dense_error = math.hypot(*(e.dense_error for e in errors)) / norm
    loss_difference = stats.loss - reference.loss
    head = policy.host.head
    truth_T = reference.per_token[head]
    difference = float((stats.per_token[head] - truth_T).abs().max())
    if dtype == torch.float64:
        allowed = FLOAT64_BAR
        loss_error = abs(loss_difference) / max(1.0, abs(reference.loss))
        # Values of a critic have any scale.
        scale = max(1.0, float(truth_T.abs().max())) if head == "values" else 1.0
        values_pass = max(loss_error, difference / scale) <= FLOAT64_BAR
    else:
        allowed = OVERALL_RATIO * dense_error + OVERALL_ULPS[dtype] * torch.finfo(dtype).eps
        values_pass = True
    return VerifyReport(
        passed=shared_error <= allowed and all(e.excess <= 1 for e in errors) and values_pass,
        dtype=str(dtype).removeprefix("torch."),
        reference_dtype=str(reference_dtype).removeprefix("torch."),
        shared_error=shared_error,
        dense_error=dense_error,
        allowed=allowed,
        worst=tuple(sorted(errors, key=lambda e: -e.excess)),
        loss_difference=loss_difference,
        dense_loss_difference=dense.loss - reference.loss,
        logprob_difference=difference,
        dense_logprob_difference=float((dense.per_token[head] - truth_T).abs().max()),
        head=head,
        sharing=stats.plan.sharing,
        boundary=stats.plan.boundary,
        logical_tokens=stats.logical_tokens,
        computed_tokens=stats.computed_tokens,
        routes=routes,
    )


class _HeldRoutes:
    """The routes of a mixture of experts, which the reference records and the others are held to.

    Of a model without experts, and of one whose routes cannot be held, nothing is held.
    """

    def __init__(
        self, model: nn.Module, batch: RolloutBatch, changes: Changes, *, hold: bool
    ) -> None:
        self._changes = changes
        self._routers: tuple[Router, ...] = ()
        self._problem: str | None = None
        try:
            self._routers = find_routers(model, changes)
        except UnsupportedError as error:
            self._problem = str(error)
        if self._routers and not hold:
            self._routers, self._problem = (), "hold_routes is False"
        self._routes: Routes | None = Routes(batch) if self._routers else None

    def run(self, model: nn.Module, *, record: bool = False) -> RoutedRun | None:
        """Hold the model, or a copy of it, to the routes, until the changes are undone.

        None where no routes are held.
        """
        if self._routes is None:
            return None
        return RoutedRun(model, self._routers, self._routes, self._changes, record=record)

    def report(self, shared: RoutedRun | None, dense: RoutedRun | None) -> RouteReport | None:
        if self._problem is not None:
            return RouteReport(held=False, reason=self._problem, shared=None, dense=None)
        if shared is None or dense is None:
            return None
        counts = (RouteCounts(run.decisions, run.elsewhere) for run in (shared, dense))
        return RouteReport(True, None, *counts)


def _parameter_errors(
    model: nn.Module, dtype: torch.dtype, shared: Gradients, dense: Gradients, truth: Gradients
) -> list[ParameterError]:
    norms = {name: _norm(gradient) for name, gradient in truth.items()}
    total = math.hypot(*norms.values())
    typical = total / math.sqrt(max(1, sum(norm > 0 for norm in norms.values())))
    errors = []
    for name, parameter in model.named_parameters():
        dense_error = _distance(dense[name], truth[name])
        if dtype == torch.float64:
            allowed = FLOAT64_BAR * total
        else:
            few = 1 + 2 / math.sqrt(parameter.numel())
            ulp = torch.finfo(dtype).eps * max(norms[name], LEAST_PART * typical)
            allowed = WORST_RATIO * few * dense_error + PARAMETER_ULPS[dtype] * ulp
        shared_error = _distance(shared[name], truth[name])
        errors.append(ParameterError(name, norms[name], shared_error, dense_error, allowed))
    return errors


def _shared(
    policy: Stepping,
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None,
    changes: Changes,
    plan: Plan | None = None,
    run: RoutedRun | None = None,
) -> tuple[Gradients, StepFigures]:
    # It compares more than a sample does.
    unchecked = policy.with_config(self_check=False)
    unchecked.observer = policy.observer
    if run is not None:
        assert plan is not None
        follow(run, unchecked, plan, batch, changes)
    step = Step(policy.host.device)
    stats = step.run(
        lambda: unchecked._run_step(step, batch, loss, denominators, 1.0, plan, announced=False)
    )
    return {name: p.grad for name, p in policy.host.model.named_parameters()}, stats


def _reference(
    policy: Stepping,
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None,
    dtype: torch.dtype,
    held: _HeldRoutes,
    changes: Changes,
) -> DenseRun:
    twin = copy.deepcopy(policy.host.model).to(dtype)
    for module in twin.modules():
        # It computes in one dtype, and functions are not copied: they call the model itself.
        vars(module).pop("forward", None)
    mark = changes.mark
    _run_plainly(twin, dtype, changes)
    with torch.enable_grad(), torch.autocast(policy.host.device.type, enabled=False):
        run = held.run(twin, record=True)
        found = dense_run(twin, batch, loss, denominators, run and run.at)
    changes.undo(mark)
    return found


def _run_plainly(model: nn.Module, dtype: torch.dtype, changes: Changes) -> None:
    """Let a stock model compute in `dtype` throughout, by code that takes any dtype."""
    run_plain_recurrences(model, changes)
    run_plain_experts(model, changes)
    if dtype == torch.float64:
        lift_upcasts(model, changes)


def _norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.double().norm())


def _distance(gradient: Tensor | None, truth: Tensor | None) -> float:
    if gradient is None or truth is None:
        present = gradient if truth is None else truth
        return _norm(present)
    return float((gradient.double() - truth.double()).norm())
