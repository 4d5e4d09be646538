"""Findings of `policy.verify`, as an object, a table and JSON."""

import io
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from forkpoint.rollouts.schema import finite
from forkpoint.verify.plans import ACROSS, CHOSEN, WITHIN, Kind, LeftOut, SharedCounts


@dataclass(frozen=True)
class ParameterError:
    """Errors of one parameter's gradient against the reference, as norms of differences.

    Attributes:
        name: name of the parameter.
        norm: norm of the reference gradient.
        shared_error: norm of (shared gradient - reference gradient).
        dense_error: norm of (gradient of ordinary training - reference gradient).
        allowed: largest `shared_error` that passes.
    """

    name: str
    norm: float
    shared_error: float
    dense_error: float
    allowed: float

    @property
    def excess(self) -> float:
        """Ratio of `shared_error` to `allowed`. A ratio above 1 fails."""
        return _excess(self.shared_error, self.allowed)


def _excess(error: float, allowed: float) -> float:
    if error == 0:
        return 0.0
    return error / allowed if math.isfinite(error) and allowed else math.inf


@dataclass(frozen=True)
class RouteCounts:
    """Choices of experts in one run of a mixture of experts.

    Attributes:
        decisions: number of pairs of token and router. A shared run counts computed tokens. A dense
            run counts the tokens of all rollouts.
        elsewhere: number of pairs for which the scores of the run would choose other experts than
            the reference did.
    """

    decisions: int
    elsewhere: int

    @property
    def fraction(self) -> float:
        """Ratio of `elsewhere` to `decisions`; 0 without decisions."""
        return self.elsewhere / self.decisions if self.decisions else 0.0


@dataclass(frozen=True)
class RouteReport:
    """Routes of the shared and the dense run, compared with those of the reference.

    Attributes:
        held: whether routes were fixed to those of the reference.
        reason: why routes were not fixed. Errors then include differences of routes.
        shared: choices of the shared run; None if routes were not fixed.
        dense: choices of the dense run; None if routes were not fixed.
    """

    held: bool
    reason: str | None
    shared: RouteCounts | None
    dense: RouteCounts | None

    def text(self) -> str:
        """Text for the last line of the table."""
        if self.shared is None or self.dense is None:
            return f"ROUTES NOT HELD: {self.reason}"
        counts = (
            f"{run.elsewhere:,} of {run.decisions:,} ({100 * run.fraction:.2f}%) {name}"
            for name, run in (("shared", self.shared), ("dense", self.dense))
        )
        others = " and ".join(counts)
        return f"routes held to the reference's; others would have been chosen for {others}"

    def to_dict(self) -> dict[str, Any]:
        """Dictionary that JSON can hold."""
        runs = {"shared": self.shared, "dense": self.dense}
        counts = {
            name: run and {**vars(run), "fraction": run.fraction} for name, run in runs.items()
        }
        return {"held": self.held, "reason": self.reason, **counts}


@dataclass(frozen=True)
class PlanFindings:
    """Errors of the gradients of one plan, and counts of its shared tokens.

    Attributes:
        kind: "within": the plan shares, and no microbatch reads another one. "across":
            microbatches read prefix caches of others. "chosen": the plan of the planner, if it is
            of another kind.
        passed: whether the plan is as exact as ordinary training.
        sharing: sharing of the plan, as in Config.
        boundary: boundary of the plan, as in Config.
        max_microbatch_tokens: largest number of tokens in a microbatch.
        counts: counts of shared tokens.
        shared_error: error over all parameters, relative to the norm of the reference gradient.
        allowed: largest error that passes.
        worst: errors of all parameters; those nearest to failing come first.
        loss_difference: loss of the plan minus loss of the reference.
        router_loss_difference: router loss of the plan minus that of the reference; None without a
            router loss.
        logprob_difference: largest difference between log-probs (values for a critic) of the plan
            and of the reference.
        routes: routes of a mixture of experts; None for other models.
    """

    kind: Kind
    passed: bool
    sharing: str
    boundary: str
    max_microbatch_tokens: int = 0
    counts: SharedCounts = field(default_factory=SharedCounts)
    shared_error: float = math.nan
    allowed: float = math.nan
    worst: tuple[ParameterError, ...] = ()
    loss_difference: float = math.nan
    router_loss_difference: float | None = None
    logprob_difference: float = math.nan
    routes: RouteReport | None = None

    @property
    def excess(self) -> float:
        """Largest ratio of an error to its limit, over parameters and the whole gradient."""
        every = (entry.excess for entry in self.worst)
        return max(_excess(self.shared_error, self.allowed), *every, 0.0)

    def text(self, dtype: str) -> str:
        """One line, such as "passed: float32, tree + across, 60 of 184 tokens run, ..."."""
        return (
            f"{'passed' if self.passed else 'FAILED'}: {dtype}, {self.sharing} + {self.boundary}, "
            f"{self.counts.text()}; error {self.shared_error:.2e} (allowed {self.allowed:.2e})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Dictionary that JSON can hold, with the ten worst parameters."""
        shaped = {"worst", "routes", "counts"}
        return {
            **finite({k: v for k, v in vars(self).items() if k not in shaped}),
            **vars(self.counts),
            "worst": [finite({**vars(e), "excess": e.excess}) for e in self.worst[:10]],
            "routes": self.routes and self.routes.to_dict(),
        }


PASSED, FAILED, NOTHING = "passed", "failed", "nothing to verify"
Verdict = Literal["passed", "failed", "nothing to verify"]


@dataclass(frozen=True)
class VerifyReport:
    """Result of `Policy.verify`.

    `plans` has the errors of each plan, and `nearest` is the plan nearest to failing. If there was
    nothing to verify, errors are NaN and `nearest.worst` is empty.

    Attributes:
        verdict: "passed": every plan is as exact as dense training of all rollouts. "failed": at
            least one is not. "nothing to verify": the batch has no shared tokens and the loss
            declares no rollout to be zero, so nothing was run; see `reason`.
        dtype: dtype of the step: the narrowest of the parameters, or that of autocast.
        reference_dtype: dtype of the reference.
        head: output of the model: "logprobs", or "values" for a critic.
        left_out: kinds of plans that were not compared, each with the reason.
        asked: sharing and boundary of the configuration.
        logical_tokens: number of tokens of the batch.
        reason: reason why there was nothing to verify, and a remedy; else None.
        plans: findings of each plan, in the order in which they ran.
        dense_error: error of the dense run over all parameters, relative to the norm of the
            reference gradient.
        dense_logprob_difference: largest difference between log-probs (values for a critic) of the
            dense run and of the reference.
        dense_router_loss_difference: router loss of the dense run minus that of the reference; None
            without a router loss.
    """

    verdict: Verdict
    dtype: str
    reference_dtype: str
    head: str
    left_out: tuple[LeftOut, ...]
    asked: tuple[str, str]
    logical_tokens: int
    reason: str | None = None
    plans: tuple[PlanFindings, ...] = ()
    dense_error: float = math.nan
    dense_logprob_difference: float = math.nan
    dense_router_loss_difference: float | None = None

    @property
    def passed(self) -> bool:
        """Whether something was compared and every plan is exact."""
        return self.verdict == PASSED

    @property
    def nearest(self) -> PlanFindings:
        """Findings of the plan with the largest `excess`; failed plans come first.

        If no plan ran, all numbers are NaN.
        """
        none = PlanFindings(CHOSEN, False, *self.asked)
        return max(self.plans, key=lambda plan: (not plan.passed, plan.excess), default=none)

    def table(self, *, most: int = 10, width: int = 100) -> str:
        """Text with the worst parameters, a line for each plan, and the verdict.

        Args:
            most: largest number of parameters.
            width: width of the table in characters.
        """
        output = io.StringIO()
        console = Console(file=output, width=width, color_system=None, highlight=False)
        if self.plans:
            console.print(self._parameters(most))
        for line in self._lines():
            console.print(line, markup=False)
        return "\n".join(line.rstrip() for line in output.getvalue().splitlines())

    def _parameters(self, most: int) -> Table:
        nearest = self.nearest
        title = f"gradients against {self.reference_dtype} training"
        if len(self.plans) > 1:
            of = f"of {len(self.plans)} plans the nearest to failing"
            title += f", {nearest.sharing} + {nearest.boundary} ({of})"
        table = Table(title=title)
        table.add_column("parameter", overflow="fold")  # names that are cut off are all alike
        for name in ("norm", "shared error", "dense error", "of allowed"):
            table.add_column(name, justify="right", overflow="fold")
        for entry in nearest.worst[:most]:
            errors = (entry.norm, entry.shared_error, entry.dense_error)
            table.add_row(entry.name, *(f"{x:.3e}" for x in errors), f"{entry.excess:.3f}")
        table.add_section()
        excess = nearest.shared_error / nearest.allowed if nearest.allowed else math.inf
        errors = (nearest.shared_error, self.dense_error)
        whole = "all, relative to the global norm"
        table.add_row(whole, "", *(f"{x:.3e}" for x in errors), f"{excess:.3f}")
        return table

    def _lines(self) -> list[str]:
        lines = [f"not compared: {entry.text()}" for entry in self.left_out]
        lines += [plan.text(self.dtype) for plan in self.plans]
        if self.reason is not None:
            return [*lines, f"NOTHING TO VERIFY: {self.reason}."]
        kinds = {WITHIN: "within microbatches", ACROSS: "across microbatches", CHOSEN: "as chosen"}
        nearest = self.nearest
        verdict = (
            f"{'passed' if self.passed else 'FAILED'}: {sum(p.passed for p in self.plans)} of "
            f"{len(self.plans)} plans, sharing {' and '.join(kinds[p.kind] for p in self.plans)}; "
            f"{'values' if self.head == 'values' else 'log-probs'} within "
            f"{nearest.logprob_difference:.2e} (dense {self.dense_logprob_difference:.2e})"
        )
        if nearest.router_loss_difference is not None:
            verdict += (
                f"; router loss within {abs(nearest.router_loss_difference):.2e} (dense "
                f"{abs(self.dense_router_loss_difference or 0.0):.2e})"
            )
        if nearest.routes is not None:
            verdict += f"; {nearest.routes.text()}"
        if not any(entry.norm for entry in nearest.worst):
            verdict += "; the gradient is zero, which proves little"
        return [*lines, verdict]

    def to_dict(self) -> dict[str, Any]:
        """Dictionary that JSON can hold, with the findings of `nearest`.

        Numbers that are not finite are None.
        """
        own = {k: v for k, v in vars(self).items() if k not in ("plans", "left_out", "asked")}
        return {
            **finite({"passed": self.passed, **own}),
            **self.nearest.to_dict(),
            "plans": [plan.to_dict() for plan in self.plans],
            "left_out": [vars(entry) for entry in self.left_out],
        }
