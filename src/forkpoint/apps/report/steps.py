"""Steps of a replay as curves: speed, drift, losses, experts. Imports no torch."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal, TypeVar

from forkpoint.apps.replay.experts import ExpertLoads, GivenRoutes
from forkpoint.apps.replay.records import ReplayStep, StepRecord
from forkpoint.apps.replay.trend import LIMIT, Trend, trend
from forkpoint.apps.report.figure import Cell, Chart, Color, Figure, Series, Table

LEAST_STEPS = 20
"""Fewer steps say nothing about a trend."""
UNUSUAL = 4
"""Multiple of the median from which times are not drawn."""
DRAWABLE = 1e100
"""Larger numbers are not drawn: their axes would overflow. They are in the table."""

T = TypeVar("T", ExpertLoads, GivenRoutes)
Values = Sequence[float | None]


def speed_figure(steps: Sequence[ReplayStep]) -> Figure:
    """Step times, and where dense ran their ratio beside the counted bound."""
    x = [step.step for step in steps]
    shared: Values = [step.shared.ms for step in steps]
    dense: Values = [None if step.dense is None else step.dense.ms for step in steps]
    bounds = [step.bound for step in steps]
    ratios = [None if d is None or s is None else d / s for d, s in zip(dense, shared, strict=True)]
    known = [ratio for ratio in ratios if ratio is not None]
    most = UNUSUAL * max(statistics.median(_known(of)) for of in (shared, dense) if _known(of))
    drawn = [_below(of, most) for of in (dense, shared)]
    bound = Series(name="counted bound", values=bounds, color="bound", style="dashed")
    speeds, times = [bound], [_points("shared", drawn[1])]
    caption = "The bound is the counted FLOPs of dense training over those of the tokens run."
    if known:
        times.insert(0, _points("dense", drawn[0]))
        usual = _below(ratios, UNUSUAL * statistics.median(known))
        speeds.append(Series(name="dense / shared", values=usual, color="shared", style="points"))
        caption = (
            f"Median speed-up of a step {statistics.median(known):.2f}x. {caption} Dense is packed "
            "microbatches with the same head, kernels and loss. The first step includes warm-up."
        )
    unusual = sum(v is not None for of in (dense, shared) for v in of)
    unusual -= sum(v is not None for of in drawn for v in of)
    note = (
        f"Not drawn: {unusual} time{'' if unusual == 1 else 's'} of a step above {UNUSUAL} times "
        "the median, such as with compilation. They are among the numbers."
    )
    return Figure(
        name="speed",
        title="Speed-up against the bound",
        caption=caption,
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
        pictures=(
            Chart(x=x, y_label="speed-up", series=tuple(speeds), zero=True),
            Chart(x=x, y_label="step, ms", series=tuple(times), zero=True),
        ),
        notes=(note,) * bool(unusual),
    )


def _points(name: Literal["shared", "dense"], values: Values) -> Series:
    return Series(name=name, values=values, color=name, style="points")


def drift_trend(steps: Sequence[ReplayStep]) -> Trend | None:
    """The trend of the mean parameter difference; None where there is too little to tell."""
    means = [step.difference.mean for step in steps if step.difference is not None]
    if len(means) < LEAST_STEPS or not all(abs(mean) < DRAWABLE for mean in means):
        return None
    return trend(means)


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
        verdict = "Some differences are not finite or too large, so nothing is said of a trend."
    sizes = (
        Series(
            name="dense since the start (rms)",
            values=_positive([d.rms_change for d in apart]),
            color="dense",
            style="dashed",
        ),
        Series(name="largest", values=_positive([d.max for d in apart]), color="accent"),
        Series(name="rms", values=_positive([d.rms for d in apart]), color="shared"),
    )
    mean = Series(name="mean", values=_finite([d.mean for d in apart]), color="shared")
    return Figure(
        name="drift",
        title="Drift of the parameters",
        caption="Parameters of the shared run less those of the dense run, over all elements, "
        f"after each step. Rounding averages out; a bias would not. {verdict}",
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
        pictures=(
            Chart(
                x=x,
                y_label="mean difference",
                series=(mean,),
                zero=True,
                band=band,
                band_name=f"noise: {LIMIT} standard errors of a walk without drift",
            ),
            Chart(x=x, y_label="difference", series=sizes, log=True),
        ),
    )


def loss_figure(steps: Sequence[ReplayStep]) -> Figure:
    """Losses and gradient norms, dense and shared, and how the losses differ."""
    x = [step.step for step in steps]
    losses = _compared(steps, [_finite([r.loss for r in of]) for of in _records(steps)])
    norms = _compared(steps, [_finite([r.gradient_norm for r in of]) for of in _records(steps)])
    pictures = [
        Chart(x=x, y_label="loss", series=losses),
        Chart(x=x, y_label="gradient norm", series=norms),
    ]
    columns = {"step": x}
    columns |= {f"loss, {series.name}": series.values for series in losses}
    columns |= {f"gradient norm, {series.name}": series.values for series in norms}
    if len(losses) > 1:
        apart = [
            None if a is None or b is None else b - a
            for a, b in zip(losses[0].values, losses[1].values, strict=True)
        ]
        series = Series(name="shared less dense", values=apart, color="accent")
        pictures.append(Chart(x=x, y_label="loss difference", series=(series,), zero=True))
    return Figure(
        name="losses",
        title="Losses and gradient norms",
        caption="Of each step, before its update.",
        table=Table(columns=tuple(columns), rows=list(zip(*columns.values(), strict=True))),
        pictures=tuple(pictures),
    )


def _records(steps: Sequence[ReplayStep]) -> tuple[list[StepRecord], list[StepRecord]]:
    """Records of dense, none without a baseline, and of shared."""
    return [step.dense for step in steps if step.dense is not None], [s.shared for s in steps]


def _compared(steps: Sequence[ReplayStep], values: Sequence[Values]) -> tuple[Series, ...]:
    """Curves of dense, if it ran in every step, and of shared on it."""
    dense, shared = values
    over = Series(name="shared", values=shared, color="shared")
    if len(dense) < len(steps):
        return (over,)
    return Series(name="dense", values=dense, color="dense", style="under"), over


# Experts
# ------------------------------------------------------------


def experts_figure(steps: Sequence[ReplayStep]) -> Figure | None:
    """Loads by layer, logical and computed, choices other than the given routes, and the router
    loss; None where no step has any of these."""
    pictures: list[Chart] = []
    columns: list[tuple[str, Sequence[Cell]]] = []
    notes: list[str] = []
    dense, shared = _records(steps)
    loads = _same_layers([record.experts for record in shared if record.experts], notes)
    dense_loads = _same_layers([record.experts for record in dense if record.experts], notes)
    if loads:
        pictures.append(_load_chart(loads, dense_loads, columns))
    routes = _same_layers([record.routes for record in shared if record.routes], notes)
    if routes:
        pictures.append(_routes_chart(routes, columns))
    losses = _compared(steps, [_finite([r.router_loss for r in of]) for of in (dense, shared)])
    if any(value is not None for series in losses for value in series.values):
        x = [step.step for step in steps]
        pictures.append(Chart(x=x, y_label="router loss", series=losses))
    if not pictures:
        return None
    layers = max((len(cells) for _, cells in columns), default=0)
    padded = [[*cells, *[None] * (layers - len(cells))] for _, cells in columns]
    return Figure(
        name="experts",
        title="Experts",
        caption="How often experts were chosen, by layer with a router, as the mean over steps, "
        "over the share of an expert if all were chosen equally often. Logical: a token counts "
        "once for every rollout through it, as in ordinary training. Computed: as often as the "
        "plan runs it.",
        table=Table(
            columns=("layer", *(name for name, _ in columns)),
            rows=[(layer, *cells) for layer, cells in enumerate(zip(*padded, strict=True))],
        ),
        pictures=tuple(pictures),
        notes=tuple(notes),
    )


def _load_chart(
    loads: Sequence[ExpertLoads],
    dense: Sequence[ExpertLoads],
    columns: list[tuple[str, Sequence[Cell]]],
) -> Chart:
    """The least and the most chosen expert of each layer over the even share."""
    series: list[Series] = []
    x = list(range(len(loads[0].logical)))
    if dense and len(dense[0].logical) == len(x):
        _, most = _least_and_most(dense, "logical")
        series.append(Series(name="most, dense", values=most, color="dense", style="under"))
    colors: dict[str, Color] = {"logical": "shared", "computed": "accent"}
    for name, color in colors.items():
        least, most = _least_and_most(loads, name)
        totals = zip(*([load.total for load in getattr(of, name)] for of in loads), strict=True)
        mean = [statistics.fmean(layer) / loads[0].experts for layer in totals]
        columns += [
            (f"choices of an expert, {name}: mean", mean),
            (f"least over mean, {name}", least),
            (f"most over mean, {name}", most),
        ]
        series.append(Series(name=f"most, {name}", values=most, color=color))
        series.append(Series(name=f"least, {name}", values=least, color=color, style="dashed"))
    label = "load over the even share"
    return Chart(x=x, x_label="layer", y_label=label, series=tuple(series), zero=True)


def _least_and_most(loads: Sequence[ExpertLoads], name: str) -> tuple[list[float], list[float]]:
    """By layer, the least and the most over the even share, as the mean over steps."""
    by_layer = list(zip(*(list(of.over_even(name)) for of in loads), strict=True))
    least = [statistics.fmean(low for low, _ in layer) for layer in by_layer]
    return least, [statistics.fmean(high for _, high in layer) for layer in by_layer]


def _routes_chart(
    routes: Sequence[GivenRoutes], columns: list[tuple[str, Sequence[Cell]]]
) -> Chart:
    """Choices for which routers would have chosen other experts than those given, in percent."""
    given = [sum(layer) for layer in zip(*(r.decisions for r in routes), strict=True)]
    other = [sum(layer) for layer in zip(*(r.elsewhere for r in routes), strict=True)]
    share = [100 * o / g if g else None for o, g in zip(other, given, strict=True)]
    columns += [
        ("given routes, all steps", given),
        ("of these routed otherwise by the router", other),
        ("in percent", share),
    ]
    series = Series(name="routed otherwise", values=share, color="shared")
    label = "tokens off their given route, %"
    x = list(range(len(given)))
    return Chart(x=x, x_label="layer", y_label=label, series=(series,), zero=True)


def _same_layers(found: Sequence[T], notes: list[str]) -> list[T]:
    """Those with as many layers and experts as the first; a folder may have been changed."""

    def size(entry: T) -> tuple[int, int]:
        if isinstance(entry, ExpertLoads):
            return entry.experts, len(entry.logical)
        return 0, len(entry.decisions)

    same = [entry for entry in found if size(entry) == size(found[0])]
    if len(same) < len(found):
        notes.append(f"Left out: {len(found) - len(same)} steps with other layers than the first.")
    return same


# Values that a scale can show
# ------------------------------------------------------------


def _known(values: Values) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _below(values: Values, most: float) -> list[float | None]:
    return [value if value is not None and value <= most else None for value in values]


def _finite(values: Values) -> list[float | None]:
    return [v if v is not None and abs(v) < DRAWABLE else None for v in values]


def _positive(values: Values) -> list[float | None]:
    return [v if v is not None and 1 / DRAWABLE < v < DRAWABLE else None for v in values]
