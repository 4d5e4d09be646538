"""Is it exact on this model and batch? Every parameter's gradient, shared and dense.

Both are compared with ordinary training in higher precision, so that the question has an answer for
16-bit models too: sharing may be no further from the truth than dense training already is.
"""

import copy
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from forkpoint.dense import DenseRun, dense_run
from forkpoint.engine.changes import Changes
from forkpoint.engine.guard import Step
from forkpoint.hosts.upcasts import lift_upcasts, run_plain_recurrences
from forkpoint.losses.base import Denominators, Loss
from forkpoint.rollouts import RolloutBatch

if TYPE_CHECKING:
    from forkpoint.policy import Policy, StepStats

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


@dataclass(frozen=True)
class ParameterError:
    """Errors of one parameter's gradient against the reference, as norms of differences."""

    name: str
    norm: float
    shared_error: float
    dense_error: float
    allowed: float

    @property
    def excess(self) -> float:
        """Error over what is allowed: above 1 fails."""
        if self.shared_error == 0:
            return 0.0
        if not math.isfinite(self.shared_error) or self.allowed == 0:
            return math.inf
        return self.shared_error / self.allowed


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found."""

    passed: bool
    dtype: str
    """What the step computes in: the narrowest of the parameters' dtypes, autocast's under it."""
    reference_dtype: str
    shared_error: float
    """Over all parameters, relative to the norm of the reference gradient."""
    dense_error: float
    allowed: float
    worst: tuple[ParameterError, ...]
    """All parameters, those nearest to failing first."""
    loss_difference: float
    """Shared loss less the reference's."""
    dense_loss_difference: float
    logprob_difference: float
    """The largest difference of a log-prob from the reference's; of a critic, of a value."""
    dense_logprob_difference: float
    head: str
    """What the model gives: "logprobs", or "values" of a critic."""
    sharing: str
    boundary: str
    logical_tokens: int
    computed_tokens: int

    def table(self, *, most: int = 10, width: int = 100) -> str:
        """The worst parameters and the verdict, as text."""
        table = Table(title=f"gradients against {self.reference_dtype} training")
        for name in ("parameter", "norm", "shared error", "dense error", "of allowed"):
            table.add_column(name, justify="left" if name == "parameter" else "right")
        for entry in self.worst[:most]:
            table.add_row(
                entry.name,
                f"{entry.norm:.3e}",
                f"{entry.shared_error:.3e}",
                f"{entry.dense_error:.3e}",
                f"{entry.excess:.3f}",
            )
        table.add_section()
        table.add_row(
            "all, relative to the global norm",
            "",
            f"{self.shared_error:.3e}",
            f"{self.dense_error:.3e}",
            f"{self.shared_error / self.allowed if self.allowed else math.inf:.3f}",
        )
        table.caption = (
            f"{'passed' if self.passed else 'FAILED'}: {self.dtype}, {self.sharing} + "
            f"{self.boundary}, {self.computed_tokens:,} of {self.logical_tokens:,} tokens run; "
            f"{'values' if self.head == 'values' else 'log-probs'} within "
            f"{self.logprob_difference:.2e} (dense {self.dense_logprob_difference:.2e})"
        )
        if not any(entry.norm for entry in self.worst):
            table.caption += "; the gradient is zero, which proves little"
        output = io.StringIO()
        Console(file=output, width=width, color_system=None, highlight=False).print(table)
        return "\n".join(line.rstrip() for line in output.getvalue().splitlines())

    def to_dict(self) -> dict[str, Any]:
        """The verdict and the ten worst parameters, ready for JSON: None is not a finite number."""
        values = {k: v for k, v in vars(self).items() if k != "worst"}
        worst = [_finite({**vars(e), "excess": e.excess}) for e in self.worst[:10]]
        return {**_finite(values), "worst": worst}


def verify(
    policy: "Policy",
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None = None,
) -> VerifyReport:
    """Compare the policy's step with ordinary training, and both with higher precision.

    The reference is the stock model run densely, without forkpoint's code, in float32 for 16-bit
    models and float64 for float32 models; it needs a copy of the model. Over all parameters the
    shared error may be 1.1 times the dense run's own, for each parameter 1.5 times (somewhat more
    for those of few elements, by whose norm chance shows), both plus rounding. A float64 model is
    its own reference, with upcasts to float32 lifted: every gradient must agree within 1e-10 of the
    global gradient norm, the loss and every log-prob (of a critic, value) within 1e-10.

    Raises as `Policy.forward_backward`.
    """
    step = Step(policy.host.device)
    return step.run(lambda: _verify(policy, batch, loss, denominators, step.changes))


def _verify(
    policy: "Policy",
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None,
    changes: Changes,
) -> VerifyReport:
    model = policy.host.model
    dtype = _lowest_dtype(model, policy.host.device)
    for p in model.parameters():
        changes.later(setattr, p, "grad", p.grad)
        p.grad = None
    mark = changes.mark
    if dtype == torch.float64:
        lift_upcasts(model, changes)
        run_plain_recurrences(model, changes)
    with torch.enable_grad():
        shared, stats = _shared(policy, batch, loss, denominators)
        dense = reference = dense_run(model, batch, loss, denominators)
    changes.undo(mark)
    reference_dtype = torch.float64
    if dtype != torch.float64:
        reference_dtype = torch.float64 if dtype == torch.float32 else torch.float32
        reference = _reference(policy, batch, loss, denominators, reference_dtype, changes)

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
    )


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
    policy: "Policy", batch: RolloutBatch, loss: Loss, denominators: Denominators | None
) -> tuple[Gradients, "StepStats"]:
    step = Step(policy.host.device)
    stats = step.run(
        lambda: policy._run_step(step, batch, loss, denominators, 1.0, None, announced=False)
    )
    return {name: p.grad for name, p in policy.host.model.named_parameters()}, stats


def _reference(
    policy: "Policy",
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None,
    dtype: torch.dtype,
    changes: Changes,
) -> DenseRun:
    twin = copy.deepcopy(policy.host.model).to(dtype)
    mark = changes.mark
    run_plain_recurrences(twin, changes)
    if dtype == torch.float64:
        lift_upcasts(twin, changes)
    with torch.enable_grad(), torch.autocast(policy.host.device.type, enabled=False):
        found = dense_run(twin, batch, loss, denominators)
    changes.undo(mark)
    return found


def _lowest_dtype(model: nn.Module, device: torch.device) -> torch.dtype:
    """What the step computes in: the narrowest of the parameters, or autocast's, if narrower."""
    dtypes = {p.dtype for p in model.parameters()}
    # Autocast leaves float64 alone.
    if torch.is_autocast_enabled(device.type) and dtypes != {torch.float64}:
        dtypes.add(torch.get_autocast_dtype(device.type))
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity and no NaN."""
    bad = {k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return {k: None if k in bad else v for k, v in values.items()}


def _norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.double().norm())


def _distance(gradient: Tensor | None, truth: Tensor | None) -> float:
    if gradient is None or truth is None:
        present = gradient if truth is None else truth
        return _norm(present)
    return float((gradient.double() - truth.double()).norm())
