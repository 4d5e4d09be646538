"""Speed, losses and drift over the steps of a replay. Imports no torch."""

import math
import statistics
from collections.abc import Callable, Sequence

from forkpoint.apps.replay.records import ReplayStep
from forkpoint.apps.replay.trend import LIMIT, Trend, trend
from forkpoint.apps.report.figure import Chart, Figure, Series, Table

LEAST_STEPS = 20
"""Fewer steps say nothing about a trend."""
UNUSUAL = 4
"""Multiple of the median from which values are not drawn."""
DRAWABLE = 1e100
"""Larger numbers are not drawn: their axes would overflow. They are in the table."""

Values = Sequence[float | None]


def drift_trend(steps: Sequence[ReplayStep]) -> Trend | None:
    """The trend of the mean parameter difference; None where there is too little to tell."""
    means = [step.difference.mean for step in steps if step.difference is not None]
    if len(means) < LEAST_STEPS or not all(abs(mean) < DRAWABLE for mean in means):
        return None
    return trend(means)


def _usual(*columns: Values) -> Callable[[Values], list[float | None]]:
    """Puts gaps where values are far above every column's median: the others are to be seen."""
    known = [[v for v in values if v is not None and math.isfinite(v)] for values in columns]
    most = UNUSUAL * max((statistics.median(values) for values in known if values), default=0.0)
    return lambda given: [None if v is not None and v > most else v for v in given]


def speed_figure(steps: Sequence[ReplayStep]) -> Figure:
    """Time of a step in both ways, and their ratio beside the counted bound."""
    x = [step.step for step in steps]
    shared = [step.shared.ms for step in steps]
    dense = [None if step.dense is None else step.dense.ms for step in steps]
    bounds = [step.bound for step in steps]
    ratios = [None if d is None else d / s for d, s in zip(dense, shared, strict=True)]
    compared = dense[0] is not None
    usual = _usual(shared, dense)
    times = [Series(name="shared", values=usual(shared), color="shared", style="points")]
    if compared:
        times.insert(0, Series(name="dense", values=usual(dense), color="dense", style="points"))
    charts = [Chart(x=x, y_label="step, ms", series=tuple(times), zero=True)]
    bound = Series(name="counted bound", values=bounds, color="bound", style="dashed")
    if compared:
        drawn = _usual(ratios)(ratios)
        speed = Series(name="dense / shared", values=drawn, color="shared", style="points")
        charts.insert(0, Chart(x=x, y_label="speed-up", series=(bound, speed), zero=True))
    else:
        charts.insert(0, Chart(x=x, y_label="bound", series=(bound,), zero=True))
    known = [ratio for ratio in ratios if ratio is not None]
    caption = "The bound is the counted FLOPs of dense training over those of the tokens run."
    if known:
        caption = (
            f"Median speed-up of a step {statistics.median(known):.2f}x. {caption} Dense is packed "
            "microbatches with the same head, kernels and loss. The first step includes warm-up."
        )
    unusual = sum(a != b for v in (shared, dense) for a, b in zip(v, usual(v), strict=True))
    notes = ()
    if unusual:
        notes = (
            f"Not drawn: {unusual} {'time' if unusual == 1 else 'times'} of a step above {UNUSUAL} "
            "times the median, such as with compilation, and ratios likewise. They are among the "
            "numbers.",
        )
    return Figure(
        name="speed",
        title="Speed-up against the bound",
        caption=caption,
        kind="chart",
        charts=tuple(charts),
        notes=notes,
        table=Table(
            columns=(
                *("step", "tokens given", "tokens run", "shared (ms)", "dense (ms)", "speed-up"),
                "counted bound",
            ),
            rows=[
                (s.step, s.logical_tokens, s.shared.computed_tokens, s.shared.ms, d, r, b)
                for s, d, r, b in zip(steps, dense, ratios, bounds, strict=True)
            ],
        ),
    )


def drift_figure(steps: Sequence[ReplayStep]) -> Figure | None:
    """How far apart the parameters are after each step; None without a baseline."""
    found = [(step.step, step.difference) for step in steps if step.difference is not None]
    if not found:
        return None
    x = [step for step, _ in found]
    apart = [difference for _, difference in found]
    known = drift_trend(steps)
    band, verdict = None, f"With fewer than {LEAST_STEPS} steps nothing can be said of a trend."
    if known is not None:
        # The standard error of a mean over n gains is the walk's spread over n steps, divided by n.
        spread = known.standard_error * math.sqrt(known.steps)
        high = [LIMIT * spread * math.sqrt(step) for step in x]
        band = ([-value for value in high], high)
        verdict = (
            f"The mean changes by {known.slope:.1e} a step, {abs(known.errors):.1f} standard "
            f"errors: {'no trend' if known.is_noise else 'a trend'} (noise is up to {LIMIT})."
        )
    elif len(found) >= LEAST_STEPS:
        verdict = (
            "Some differences are not finite, or too large to be drawn, so that nothing can be "
        )
        verdict += "said of a trend."
    sizes = Chart(
        x=x,
        y_label="difference, log scale",
        series=(
            Series(
                name="dense since the start (rms)",
                values=_positive([d.rms_change for d in apart]),
                color="dense",
                style="dashed",
            ),
            Series(name="largest", values=_positive([d.max for d in apart]), color="accent"),
            Series(name="rms", values=_positive([d.rms for d in apart]), color="shared"),
        ),
        log=True,
    )
    mean = Chart(
        x=x,
        y_label="mean difference",
        series=(Series(name="mean", values=_finite([d.mean for d in apart]), color="shared"),),
        zero=True,
        band=band,
        band_name=f"noise: {LIMIT} standard errors of a walk without drift",
    )
    return Figure(
        name="drift",
        title="Drift of the parameters",
        caption="Parameters of the shared run less those of the dense run, over all elements, "
        f"after each step. Rounding averages out; a bias would not. {verdict}",
        kind="chart",
        charts=(mean, sizes),
        table=Table(
            columns=(
                *("step", "mean difference", "mean absolute", "rms", "largest"),
                "rms change of dense since the start",
            ),
            rows=[
                (n, d.mean, d.mean_absolute, d.rms, d.max, d.rms_change)
                for n, d in zip(x, apart, strict=True)
            ],
        ),
    )


def loss_figure(steps: Sequence[ReplayStep]) -> Figure:
    """Losses and gradient norms in both ways, and how they differ."""
    x = [step.step for step in steps]
    dense = [step.dense for step in steps if step.dense is not None]
    charts = []
    rows: list[list[float | int | None]] = [[n] for n in x]
    columns = ["step"]
    for name, label in (("loss", "loss"), ("gradient_norm", "gradient norm")):
        shared_values = _finite([getattr(step.shared, name) for step in steps])
        series = [Series(name="shared", values=shared_values, color="shared")]
        dense_values: list[float | None] = [None] * len(x)
        if dense:
            dense_values = _finite([getattr(record, name) for record in dense])
            # Below and wider, since the two lie on each other.
            under = Series(name="dense", values=dense_values, color="dense", style="under")
            series.insert(0, under)
        charts.append(Chart(x=x, y_label=label, series=tuple(series)))
        columns += [f"{label}, shared", f"{label}, dense"]
        for row, one, other in zip(rows, shared_values, dense_values, strict=True):
            row += [one, other]
    if dense:
        apart = [
            None if a is None or b is None else a - b
            for a, b in zip(
                _finite([step.shared.loss for step in steps]),
                _finite([record.loss for record in dense]),
                strict=True,
            )
        ]
        difference = Series(name="shared less dense", values=apart, color="accent")
        charts.append(Chart(x=x, y_label="loss difference", series=(difference,), zero=True))
    return Figure(
        name="losses",
        title="Losses and gradient norms",
        caption="Of each step, before its update."
        + (" The two ways lie on each other as far as rounding lets them." if dense else ""),
        kind="chart",
        charts=tuple(charts),
        table=Table(columns=tuple(columns), rows=rows),
    )


def _finite(values: Sequence[float]) -> list[float | None]:
    """Values that a scale can show."""
    return [value if abs(value) < DRAWABLE else None for value in values]


def _positive(values: Sequence[float]) -> list[float | None]:
    """Values that a logarithmic scale can show."""
    return [value if 1 / DRAWABLE < value < DRAWABLE else None for value in values]
