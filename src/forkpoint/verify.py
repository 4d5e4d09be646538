"""Is it exact on this model and batch? Every parameter's gradient, shared and dense.

Both are compared with ordinary training in higher precision, so that the question has an answer for
16-bit models too: sharing may be no further from the truth than dense training already is.
"""

import copy
import io
import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from forkpoint.dense import DenseRun, dense_run
from forkpoint.hosts.upcasts import lifted_upcasts
from forkpoint.losses.base import Denominators, Loss
from forkpoint.plan import Plan
from forkpoint.rollouts import RolloutBatch

if TYPE_CHECKING:
    from forkpoint.policy import Policy

OVERALL_RATIO = 1.1
WORST_RATIO = 1.5
FLOAT64_BAR = 1e-10
# Where dense happens to hit the truth to the last bit, a ratio of errors says nothing: an error of
# so many units in the last place of the parameter's gradient (and of the global norm, over the
# square root of the parameters' number) is rounding.
ROUNDING_ULPS = {torch.float32: 8.0, torch.bfloat16: 0.25, torch.float16: 0.25}


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
    """The largest difference of a log-prob from the reference's."""
    dense_logprob_difference: float
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
            f"log-probs within {self.logprob_difference:.2e} (dense "
            f"{self.dense_logprob_difference:.2e})"
        )
        output = io.StringIO()
        Console(file=output, width=width, color_system=None, highlight=False).print(table)
        return "\n".join(line.rstrip() for line in output.getvalue().splitlines())

    def to_dict(self) -> dict[str, Any]:
        """The verdict and the ten worst parameters, ready for JSON."""
        values = {k: v for k, v in vars(self).items() if k != "worst"}
        worst = [{**vars(e), "excess": e.excess} for e in self.worst[:10]]
        return {**values, "worst": worst}


def verify(
    policy: "Policy",
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None = None,
) -> VerifyReport:
    """Compare the policy's step with ordinary training, and both with higher precision.

    The reference is the stock model run densely, without forkpoint's code, in float32 for 16-bit
    models and float64 for float32 models; it needs a copy of the model. Over all parameters the
    shared error may be 1.1 times the dense run's own, for each parameter 1.5 times. A float64 model
    is its own reference and must agree within 1e-10 of the global gradient norm.

    Raises as `Policy.forward_backward`.
    """
    model = policy.host.model
    parameters = dict(model.named_parameters())
    dtype = _lowest_dtype(model, policy.host.device)
    reference_dtype = torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64
    with ExitStack() as stack:
        if dtype == torch.float64:
            stack.enter_context(lifted_upcasts(model))
        shared, shared_loss, logprobs, plan = _shared(policy, parameters, batch, loss, denominators)
        dense = dense_run(model, batch, loss, denominators)
        reference = dense
        if dtype != torch.float64:
            reference = _reference(policy, batch, loss, denominators, reference_dtype)

    errors, squares = [], {"norm": 0.0, "shared": 0.0, "dense": 0.0}
    norms = {n: _norm(g) for n, g in reference.gradients.items()}
    total = math.sqrt(sum(n * n for n in norms.values()))
    count = max(1, sum(g is not None for g in reference.gradients.values()))
    ulps = ROUNDING_ULPS.get(dtype, 0.0) * torch.finfo(dtype).eps
    for name, truth in reference.gradients.items():
        shared_error = _distance(shared[name], truth)
        dense_error = _distance(dense.gradients[name], truth)
        rounding = ulps * max(norms[name], total / math.sqrt(count))
        allowed = WORST_RATIO * dense_error + rounding
        if dtype == torch.float64:
            allowed = FLOAT64_BAR * total
        errors.append(ParameterError(name, norms[name], shared_error, dense_error, allowed))
        for key, value in (("shared", shared_error), ("dense", dense_error)):
            squares[key] += value * value
    scale = total or 1.0
    shared_total, dense_total = (math.sqrt(squares[k]) / scale for k in ("shared", "dense"))
    allowed = OVERALL_RATIO * dense_total + ulps
    if dtype == torch.float64:
        allowed = FLOAT64_BAR
    errors.sort(key=lambda e: -e.excess)
    passed = shared_total <= allowed and all(e.excess <= 1 for e in errors)
    return VerifyReport(
        passed=bool(passed),
        dtype=str(dtype).removeprefix("torch."),
        reference_dtype=str(reference_dtype).removeprefix("torch."),
        shared_error=shared_total,
        dense_error=dense_total,
        allowed=allowed,
        worst=tuple(errors),
        loss_difference=shared_loss - reference.loss,
        dense_loss_difference=dense.loss - reference.loss,
        logprob_difference=float((logprobs - reference.logprobs_T).abs().max()),
        dense_logprob_difference=float((dense.logprobs_T - reference.logprobs_T).abs().max()),
        sharing=plan.sharing,
        boundary=plan.boundary,
        logical_tokens=plan.logical_tokens,
        computed_tokens=plan.computed_tokens,
    )


def _shared(
    policy: "Policy",
    parameters: dict[str, nn.Parameter],
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None,
) -> tuple[dict[str, Tensor | None], float, Tensor, Plan]:
    before = {name: p.grad for name, p in parameters.items()}
    try:
        for p in parameters.values():
            p.grad = None
        stats = policy.forward_backward(batch, loss, denominators=denominators)
        gradients = {name: p.grad for name, p in parameters.items()}
    finally:
        for name, p in parameters.items():
            p.grad = before[name]
    return gradients, stats.loss, stats.logprobs, stats.plan


def _reference(
    policy: "Policy",
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None,
    dtype: torch.dtype,
) -> DenseRun:
    twin = copy.deepcopy(policy.host.model).to(dtype)
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(policy.host.device.type, enabled=False))
        if dtype == torch.float64:
            stack.enter_context(lifted_upcasts(twin))
        return dense_run(twin, batch, loss, denominators)


def _lowest_dtype(model: nn.Module, device: torch.device) -> torch.dtype:
    """What the step computes in: autocast's dtype if on, else the narrowest of the parameters."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return max({p.dtype for p in model.parameters()}, key=lambda d: torch.finfo(d).eps)


def _norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.double().norm())


def _distance(gradient: Tensor | None, truth: Tensor | None) -> float:
    if gradient is None or truth is None:
        present = gradient if truth is None else truth
        return _norm(present)
    return float((gradient.double() - truth.double()).norm())
