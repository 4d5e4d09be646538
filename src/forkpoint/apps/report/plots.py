"""The figures of a report for papers: PNG and SVG by matplotlib."""

import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkpoint.apps.report.figure import Chapter, Chart, Figure
from forkpoint.apps.report.text import cut, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    "grid.color": "#dfe3e8",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "forkpoint",
    "text.parse_math": False,  # names of rollouts may hold dollar signs
}
MOST_STEM_CHARACTERS = 60
MOST_TITLE_CHARACTERS = 80
WIDTH_INCHES, HEIGHT_INCHES, DPI = 6.5, 2.6, 200


def write_plots(chapters: Sequence[Chapter], folder: Path) -> list[Path]:
    """Write every figure that is a picture, as PNG and as SVG; returns their paths."""
    # A second to import, which the page does not need.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # Names may have characters that the font lacks: they are boxes in the PNG, and text in the
        # SVG.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        for number, chapter in enumerate(chapters):
            stem = re.sub(r"[^A-Za-z0-9]+", "-", Path(chapter.title).stem).strip("-")
            stem = stem[:MOST_STEM_CHARACTERS] or "input"
            for name, height, draw in _pictures(chapter):
                canvas = Canvas(figsize=(WIDTH_INCHES, height), layout="constrained")
                FigureCanvasAgg(canvas)
                draw(canvas.add_subplot())
                for suffix in (".png", ".svg"):
                    path = folder / f"{number}-{stem}-{name}{suffix}"
                    # No date, so that equal figures are equal files.
                    metadata = {"Date": None} if suffix == ".svg" else None
                    canvas.savefig(path, dpi=DPI, metadata=metadata)
                    written.append(path)
    return written


def _pictures(chapter: Chapter) -> Iterator[tuple[str, float, Any]]:
    """Name, height in inches, and what draws it on axes."""
    for figure in chapter.figures:
        for index, chart in enumerate(figure.charts):
            yield (
                f"{figure.name}-{index}",
                HEIGHT_INCHES,
                lambda axes, chart=chart: draw_chart(axes, chart),
            )
        if figure.choices:
            draw = {"forest": draw_forest, "timeline": draw_timeline}[figure.kind]
            lanes = len(figure.choices[0].data) if figure.kind == "timeline" else 2
            yield (
                figure.name,
                1.2 + 0.8 * lanes,
                lambda axes, figure=figure, draw=draw: draw(axes, figure),
            )


def draw_chart(axes: "Axes", chart: Chart) -> None:
    for series in chart.series:
        points = series.style == "points"
        axes.plot(
            list(chart.x),
            [float("nan") if value is None else value for value in series.values],
            color=COLORS[series.color],
            label=series.name,
            linestyle={"dashed": "--", "points": ""}.get(series.style, "-"),
            marker="o" if points else "",
            markersize=2.5,
            linewidth=4 if series.style == "under" else 1.3,
            alpha=0.45 if series.style == "under" else 1,
        )
    if chart.band is not None:
        axes.fill_between(
            list(chart.x),
            list(chart.band[0]),
            list(chart.band[1]),
            color=COLORS["shared"],
            alpha=0.13,
            linewidth=0,
            label=chart.band_name,
        )
    if chart.log and any(value for series in chart.series for value in series.values):
        axes.set_yscale("log")
        # Powers of ten are written in TeX by default, which parse_math leaves as it is.
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter("")
    elif chart.zero:
        axes.axhline(0, color="#5b6675", linewidth=0.8)
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    if len(chart.series) + (chart.band is not None) > 1:
        axes.legend(fontsize=7)


def draw_forest(axes: "Axes", figure: Figure) -> None:
    """The first of its forests: bands to scale, one lane a rollout."""
    choice = figure.choices[0]
    for node in choice.data["nodes"]:
        hidden = "segments" in node
        shared = node["end"] - node["begin"] > 1
        axes.barh(
            (node["begin"] + node["end"]) / 2,
            node["length"],
            left=node["start"],
            height=(node["end"] - node["begin"]) * 0.92,
            color="white" if hidden else "#3f82d6" if shared else "#a9c8ee",
            edgecolor="#5b6675" if hidden else "white",
            hatch="////" if hidden else None,
            linewidth=0.4,
        )
    axes.set(xlabel="position (tokens)", ylabel="rollouts", title=_title(choice.label))
    axes.invert_yaxis()
    axes.grid(False)


def draw_timeline(axes: "Axes", figure: Figure) -> None:
    """The first of its timelines, a lane for each way; memory is in the page and in the rows."""
    choice = figure.choices[0]
    named: set[str] = set()
    lanes = choice.data
    for place, lane in enumerate(lanes):
        at = 0.0
        blocks = [(event["key"], event["size"]) for event in lane["events"]]
        if lane["events_left_out"]:
            blocks.append(("left out", lane["size_left_out"]))
        if lane["rest"]:
            blocks.append(("rest", lane["rest"]))
        for phase, size in blocks:
            color, label = PHASES.get(phase, ("white", "events left out"))
            axes.barh(
                place,
                size,
                left=at,
                height=0.55,
                color=color,
                edgecolor="#5b6675" if color == "white" else "white",
                hatch="////" if color == "white" else None,
                linewidth=0.4,
                label=None if label in named else label,
            )
            named.add(label)
            at += size
    axes.set_yticks(range(len(lanes)), [lane["name"] for lane in lanes])
    axes.invert_yaxis()
    axes.grid(False)
    measured = "measured" if lanes[0]["measured"] else "counted"
    axes.set(xlabel=f"{lanes[0]['unit']} ({measured})", title=_title(choice.label))
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.28))


def _title(label: str) -> str:
    """A label that may hold names from a file, as one line that XML can hold."""
    return cut(visible(" ".join(label.split())), MOST_TITLE_CHARACTERS)
