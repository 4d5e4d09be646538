"""Loads of a mixture's experts over the steps of a replay, by layer. Imports no torch."""

import statistics
from collections.abc import Sequence
from typing import Literal, TypeVar

from forkpoint.apps.replay.experts import ExpertLoads, GivenRoutes
from forkpoint.apps.replay.records import ReplayStep, StepRecord
from forkpoint.apps.report.figure import Cell, Chart, Figure, Series, Table

T = TypeVar("T", ExpertLoads, GivenRoutes)
Way = Literal["shared", "dense"]
COLOURS: tuple[tuple[str, Literal["shared", "accent"]], ...] = (
    ("logical", "shared"),
    ("computed", "accent"),
)
STYLES: tuple[tuple[Way, Literal["under", "line"]], ...] = (("dense", "under"), ("shared", "line"))
ColumnsOfLayers = list[tuple[str, Sequence[Cell]]]


def experts_figure(steps: Sequence[ReplayStep]) -> Figure | None:
    """Loads by layer, logical and computed, choices other than the given routes, and the router
    loss; None where no step has any of these."""
    ways: dict[Way, list[StepRecord]] = {"shared": [step.shared for step in steps]}
    dense = [step.dense for step in steps if step.dense is not None]
    if dense:
        ways["dense"] = dense
    charts: list[Chart] = []
    columns: ColumnsOfLayers = []
    notes: list[str] = []
    loads = _same_layers([record.experts for record in ways["shared"] if record.experts], notes)
    dense_loads = _same_layers([r.experts for r in dense if r.experts], [])
    if loads:
        charts.append(_load_chart(loads, dense_loads, columns))
    routes = _same_layers([record.routes for record in ways["shared"] if record.routes], notes)
    if routes:
        charts.append(_routes_chart(routes, columns))
    losses = _loss_chart(steps, ways)
    if losses is not None:
        charts.append(losses)
    if not charts:
        return None
    layers = max((len(cells) for _, cells in columns), default=0)
    padded = [[*cells, *[None] * (layers - len(cells))] for _, cells in columns]
    return Figure(
        name="experts",
        title="Experts",
        caption="How often experts were chosen, by layer with a router, as the mean over steps. "
        "The even share is that of an expert where all are chosen equally often. "
        "Logical: a token counts once for every rollout through it, as in ordinary training. "
        "Computed: as often as the plan runs it, the load that experts have."
        if columns
        else "The loss of a mixture's routers, with its coefficients.",
        kind="chart",
        charts=tuple(charts),
        notes=tuple(notes),
        table=Table(
            columns=("layer", *(name for name, _ in columns)),
            rows=[(layer, *cells) for layer, cells in enumerate(zip(*padded, strict=True))],
        ),
    )


def _load_chart(
    loads: Sequence[ExpertLoads], dense: Sequence[ExpertLoads], columns: ColumnsOfLayers
) -> Chart:
    """The least and the most of each layer over the even share, whose mean is 1."""
    x = list(range(len(loads[0].logical)))
    series: list[Series] = []
    if dense and len(dense[0].logical) == len(x):
        _, most = _spread(dense, "logical")
        series.append(Series(name="most, dense", values=most, color="dense", style="under"))
    for name, color in COLOURS:
        least, most = _spread(loads, name)
        mean = [_mean(sides) / loads[0].experts for sides in _totals(loads, name)]
        columns += [
            (f"choices of an expert, {name}: mean", mean),
            (f"least over mean, {name}", least),
            (f"most over mean, {name}", most),
        ]
        series.append(Series(name=f"most, {name}", values=most, color=color))
        series.append(Series(name=f"least, {name}", values=least, color=color, style="dashed"))
    return Chart(
        x=x,
        x_label="layer",
        y_label="load over the even share",
        series=tuple(series),
        zero=True,
    )


def _routes_chart(routes: Sequence[GivenRoutes], columns: ColumnsOfLayers) -> Chart:
    """Choices for which routers would have chosen other experts than those given, in percent."""
    given = [sum(layer) for layer in zip(*(r.decisions for r in routes), strict=True)]
    other = [sum(layer) for layer in zip(*(r.elsewhere for r in routes), strict=True)]
    share = [100 * o / g if g else None for o, g in zip(other, given, strict=True)]
    columns += [
        ("given routes, all steps", given),
        ("of these routed otherwise by the router", other),
        ("in percent", share),
    ]
    return Chart(
        x=list(range(len(given))),
        x_label="layer",
        y_label="tokens off their given route, %",
        series=(Series(name="routed otherwise", values=share, color="shared"),),
        zero=True,
    )


def _loss_chart(steps: Sequence[ReplayStep], ways: dict[Way, list[StepRecord]]) -> Chart | None:
    series = []
    for name, style in STYLES:
        values = [record.router_loss for record in ways.get(name, [])]
        if any(value is not None for value in values):
            drawn = [None if v is None or not abs(v) < 1e100 else v for v in values]
            series.append(Series(name=name, values=drawn, color=name, style=style))
    if not series:
        return None
    return Chart(x=[step.step for step in steps], y_label="router loss", series=tuple(series))


def _same_layers(found: Sequence[T], notes: list[str]) -> list[T]:
    """Those that have as many layers and experts as the first, which all steps of one model have;
    a folder may have been changed."""

    def size(entry: T) -> tuple[int, int]:
        if isinstance(entry, ExpertLoads):
            return entry.experts, len(entry.logical)
        return 0, len(entry.decisions)

    same = [entry for entry in found if size(entry) == size(found[0])]
    if len(same) < len(found):
        notes.append(f"Left out: {len(found) - len(same)} steps with other layers than the first.")
    return same


def _totals(loads: Sequence[ExpertLoads], name: str) -> list[tuple[int, ...]]:
    """By layer, the choices of each step."""
    return list(zip(*([load.total for load in getattr(one, name)] for one in loads), strict=True))


def _spread(loads: Sequence[ExpertLoads], name: str) -> tuple[list[float], list[float]]:
    """By layer, the least and the most over the even share, as the mean over steps."""
    by_layer = list(zip(*(list(one.over_even(name)) for one in loads), strict=True))
    least = [_mean([low for low, _ in layer]) for layer in by_layer]
    return least, [_mean([high for _, high in layer]) for layer in by_layer]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)
