"""Pictures of a report by matplotlib: SVG for the page, PNG and SVG for papers."""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure as Canvas

from forkpoint.apps.report.figure import Chapter, Chart, ForestPicture, Picture, SchedulePicture
from forkpoint.apps.report.text import abbreviate, visible

COLORS = {"shared": "#1f66c7", "dense": "#7d8794", "bound": "#b45f06", "accent": "#7a4fb5"}
PHASES = {
    "score": ("#c9a227", "score"),
    "prefix forward": ("#0f8a7e", "prefix: forward"),
    "leaf forward": ("#86b3ea", "leaf: forward"),
    "leaf backward": ("#1f66c7", "leaf: backward"),
    "prefix recompute": ("#bfa3e0", "prefix: forward again"),
    "prefix backward": ("#7a4fb5", "prefix: backward"),
    "idle": ("#e08e79", "idle: other ranks run"),
    "rest": ("#ccd3db", "planning and optimizer"),
}
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dfe3e8",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "forkpoint",
    "text.parse_math": False,  # names of rollouts may hold dollar signs
}
MAX_STEM_CHARACTERS = 60
MAX_TITLE_CHARACTERS = 80
WIDTH_INCHES, HEIGHT_INCHES, DPI = 6.5, 2.6, 200


def svg(picture: Picture) -> bytes:
    """A picture as an SVG file. Equal pictures are equal files."""
    with _styled():
        return _rendered(picture, "svg")


def write_plots(chapters: Sequence[Chapter], folder: Path) -> list[Path]:
    """Write every picture as PNG and as SVG, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with _styled():
        for number, chapter in enumerate(chapters):
            stem = re.sub(r"[^A-Za-z0-9]+", "-", Path(chapter.title).stem).strip("-")
            stem = stem[:MAX_STEM_CHARACTERS] or "input"
            for figure in chapter.figures:
                for index, picture in enumerate(figure.pictures):
                    for kind in ("png", "svg"):
                        path = folder / f"{number}-{stem}-{figure.name}-{index}.{kind}"
                        path.write_bytes(_rendered(picture, kind))
                        written.append(path)
    return written


@contextmanager
def _styled() -> Iterator[None]:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # The font may lack characters of names: they are boxes in a PNG, and text in an SVG.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


def _rendered(picture: Picture, kind: str) -> bytes:
    canvas = Canvas(layout="constrained")
    FigureCanvasAgg(canvas)
    if isinstance(picture, Chart):
        canvas.set_size_inches(WIDTH_INCHES, HEIGHT_INCHES)
        draw_chart(canvas.add_subplot(), picture)
    elif isinstance(picture, ForestPicture):
        canvas.set_size_inches(WIDTH_INCHES, 1.1 * HEIGHT_INCHES)
        draw_forest(canvas.add_subplot(), picture)
    else:
        canvas.set_size_inches(WIDTH_INCHES, 1.5 * HEIGHT_INCHES)
        draw_schedule(canvas.subplots(2, 1, sharex=True), picture)
    file = io.BytesIO()
    # Without a date equal figures are equal files.
    canvas.savefig(file, format=kind, dpi=DPI, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def draw_chart(axes: Axes, chart: Chart) -> None:
    """Curves, with a legend if there are several."""
    for series in chart.series:
        points, under = series.style == "points", series.style == "under"
        axes.plot(
            list(chart.x),
            [float("nan") if value is None else value for value in series.values],
            color=COLORS[series.color],
            label=series.name,
            linestyle={"dashed": "--", "points": ""}.get(series.style, "-"),
            marker="o" if points else "",
            markersize=2.5,
            linewidth=4 if under else 1.3,
            alpha=0.45 if under else 1,
        )
    if chart.band is not None:
        low, high = map(list, chart.band)
        shade = {"color": COLORS["shared"], "alpha": 0.13, "linewidth": 0}
        axes.fill_between(list(chart.x), low, high, label=chart.band_name, **shade)
    if chart.log and any(value for series in chart.series for value in series.values):
        axes.set_yscale("log")
        # matplotlib writes powers of ten in TeX, which parse_math leaves as it is.
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter("")
    elif chart.zero:
        axes.axhline(0, color="#5b6675", linewidth=0.8)
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    axes.locator_params(axis="x", integer=True)
    if len(chart.series) + (chart.band is not None) > 1:
        axes.legend(fontsize=7)


def draw_forest(axes: Axes, forest: ForestPicture) -> None:
    """A band for each segment, to scale, one lane a rollout."""
    left, right = forest.start, forest.start + forest.length
    gap = 0.04 * (forest.end - forest.begin)
    top, bottom = forest.begin + gap, forest.end - gap
    corners = np.array([[left, top], [right, top], [right, bottom], [left, bottom]])
    shared = forest.end - forest.begin > 1
    for chosen, color, name in (
        (shared, "#3f82d6", "shared by several rollouts"),
        (~shared, "#a9c8ee", "of one rollout"),
    ):
        bands = list(corners[:, :, chosen].transpose(2, 0, 1))
        axes.add_collection(
            PolyCollection(bands, facecolors=color, edgecolors="white", linewidths=0.4, label=name)
        )
    axes.autoscale_view()
    axes.set(xlabel="position (tokens)", ylabel="rollouts", title=_one_line(forest.label))
    if forest.groups:
        places = [place for _, place in forest.groups]
        axes.set_yticks(places, [_one_line(name, 24) for name, _ in forest.groups], fontsize=7)
    axes.invert_yaxis()
    axes.grid(False)
    axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def draw_schedule(axes: Sequence[Axes], schedule: SchedulePicture) -> None:
    """The events of each lane by phase, and beneath them the memory that is held."""
    bars, memory = axes
    named: set[str] = set()
    for place, lane in enumerate(schedule.lanes):
        sizes = [*(event.size for event in lane.events), lane.rest]
        ends = list(accumulate(sizes))
        phases = [*(event.phase for event in lane.events), "rest"]
        for phase, (color, label) in PHASES.items():
            spans = [
                (end - size, size)
                for end, size, of in zip(ends, sizes, phases, strict=True)
                if of == phase and size
            ]
            if spans:
                label = "" if label in named else label
                named.add(label)
                look: dict[str, Any] = {"facecolors": color, "edgecolors": "white"}
                bars.broken_barh(spans, (place - 0.3, 0.6), label=label, linewidth=0.4, **look)
        held = [event.held for event in lane.events]
        memory.stairs(held, [0.0, *ends[:-1]], label=lane.name, color=COLORS[lane.name], fill=False)
    bars.set_yticks(range(len(schedule.lanes)), [lane.name for lane in schedule.lanes])
    bars.invert_yaxis()
    bars.grid(False)
    bars.set_title(_one_line(schedule.label))
    bars.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.05))
    held = f"held, {schedule.held_unit} ({schedule.held_source})"
    memory.set(xlabel=schedule.unit, ylabel=held)
    memory.set_ylim(bottom=0)
    memory.legend(fontsize=7)


def _one_line(text: str, most: int = MAX_TITLE_CHARACTERS) -> str:
    """Text from a file, as one line that XML can hold."""
    return abbreviate(visible(" ".join(text.split())), most)
