"""Findings of `policy.verify`, as an object, a table and JSON."""

import io
import math
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


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
class RouteCounts:
    """Choices of experts in one run of a mixture of experts."""

    decisions: int
    """Tokens that ran, times the routers that they passed. Of a shared run these are computed
    tokens, of a dense run logical ones."""
    elsewhere: int
    """Those among them for which the run's own scores choose other experts than the reference's."""

    @property
    def fraction(self) -> float:
        """Of the decisions, how many would have gone elsewhere."""
        return self.elsewhere / self.decisions if self.decisions else 0.0


@dataclass(frozen=True)
class RouteReport:
    """Whether both runs were held to the experts that the reference chose, and what it changed."""

    held: bool
    reason: str | None
    """Why routes were not held; then differences of routes are part of the errors."""
    shared: RouteCounts | None
    """None where routes were not held."""
    dense: RouteCounts | None
    """The same."""

    def text(self) -> str:
        """As it stands in the table's caption."""
        if self.shared is None or self.dense is None:
            return f"ROUTES NOT HELD: {self.reason}"
        counts = (
            f"{run.elsewhere:,} of {run.decisions:,} ({100 * run.fraction:.2f}%) {name}"
            for name, run in (("shared", self.shared), ("dense", self.dense))
        )
        return (
            f"routes held to the reference's; others would have been chosen for "
            f"{' and '.join(counts)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        sides = {"shared": self.shared, "dense": self.dense}
        counts = {
            name: run and {**vars(run), "fraction": run.fraction} for name, run in sides.items()
        }
        return {"held": self.held, "reason": self.reason, **counts}


@dataclass(frozen=True)
class VerifyReport:
    """Findings of `verify`."""

    passed: bool
    dtype: str
    """Dtype of the step's computation: the narrowest of the parameters', or autocast's."""
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
    """The kind of the model's values: "logprobs", or "values" of a critic."""
    sharing: str
    boundary: str
    logical_tokens: int
    computed_tokens: int
    routes: RouteReport | None = None
    """Of a mixture of experts in float32 or 16 bits; None for other models."""

    def table(self, *, most: int = 10, width: int = 100) -> str:
        """The worst parameters and the verdict, as text."""
        title = f"gradients against {self.reference_dtype} training"
        table = Table(title=title, caption_justify="left")
        for name in ("parameter", "norm", "shared error", "dense error", "of allowed"):
            # Names that are cut off are all alike.
            left = name == "parameter"
            table.add_column(name, justify="left" if left else "right", overflow="fold")
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
        if self.routes is not None:
            table.caption += f"; {self.routes.text()}"
        if not any(entry.norm for entry in self.worst):
            table.caption += "; the gradient is zero, which proves little"
        output = io.StringIO()
        Console(file=output, width=width, color_system=None, highlight=False).print(table)
        return "\n".join(line.rstrip() for line in output.getvalue().splitlines())

    def to_dict(self) -> dict[str, Any]:
        """The verdict and the ten worst parameters, ready for JSON: None is not a finite number."""
        values = {k: v for k, v in vars(self).items() if k not in ("worst", "routes")}
        worst = [_finite({**vars(e), "excess": e.excess}) for e in self.worst[:10]]
        routes = None if self.routes is None else self.routes.to_dict()
        return {**_finite(values), "worst": worst, "routes": routes}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity and no NaN."""
    bad = {k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return {k: None if k in bad else v for k, v in values.items()}
