"""Pictures of a report: SVG by matplotlib."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from forkpoint.plan.lanes import Lane
from forkpoint.plan.program import RELEASE

Draw = Callable[[Figure], None]
"""Draws one picture into an empty figure."""
COLORS = {"shared": "#1f66c7", "dense": "#7d8794", "bound": "#b45f06", "difference": "#7a4fb5"}
LANE_COLORS = {
    "forward": "#1f66c7",
    "recompute": "#7a4fb5",
    "backward": "#b45f06",
    "encode": "#2e8b57",
    "idle": "#dfe3e8",
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
    "svg.hashsalt": "forkpoint",  # equal pictures are equal files
}
DRAWABLE = 1e100
"""Larger numbers are not drawn: their axes would overflow."""


def as_svg(draw: Draw) -> bytes:
    """A picture as the content of a file."""
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        canvas = Figure(figsize=(6.5, 2.8), layout="constrained")
        FigureCanvasAgg(canvas)
        draw(canvas)
        canvas.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def curves(
    x: Sequence[int],
    label: str,
    lines: Mapping[str, Sequence[float | None]],
    *,
    dots: bool = False,
    log: bool = False,
    band: Sequence[float] | None = None,
) -> Draw:
    """Curves over steps, colored by the first word of their names.

    Args:
        x: steps.
        label: of the other axis.
        lines: the values of each curve by its name; what cannot be drawn is a gap.
        dots: whether values are dots without a line; a bound is always a dashed line.
        log: whether the axis is logarithmic; then it has no numbers up to 0.
        band: half of the width of a shaded range around 0, which is noise.
    """

    def draw(canvas: Figure) -> None:
        axes = canvas.add_subplot()
        shown = {name: [_drawn(value, log) for value in values] for name, values in lines.items()}
        for name, values in shown.items():
            bound = name.startswith("bound")
            axes.plot(
                list(x),
                values,
                color=COLORS[name.partition(" ")[0]],
                label=name,
                linestyle="--" if bound else "" if dots else "-",
                marker="o" if dots and not bound else "",
                markersize=2.5,
                linewidth=4 if name == "dense" else 1.3,
                alpha=0.45 if name == "dense" and not dots else 1,
            )
        if band is not None:
            high = np.asarray(band)
            shade: Any = {"color": COLORS["shared"], "alpha": 0.13, "linewidth": 0}
            axes.fill_between(list(x), -high, high, label="noise", **shade)
        if log and any(math.isfinite(value) for values in shown.values() for value in values):
            axes.set_yscale("log")
        axes.set(xlabel="step", ylabel=label)
        axes.locator_params(axis="x", integer=True)
        if len(shown) > 1 or band is not None:
            axes.legend(fontsize=7)

    return draw


def lanes_of_stages(lanes: Sequence[Lane], label: str) -> Draw:
    """A lane for each stage, the first at the top: what it runs, and where it is idle.

    Bars of stage 0 that are forwards are the group "stage-0-forward" of the picture.
    """
    end = max((lane.ends[-1] for lane in lanes if lane.ends), default=0.0)

    def draw(canvas: Figure) -> None:
        canvas.set_figheight(1.2 + 0.32 * len(lanes))
        axes = canvas.add_subplot()
        shown = set[str]()
        for stage, lane in enumerate(lanes):
            for kind, bars in _bars(lane, end).items():
                if bars:
                    shown.add(kind)
                    drawn = axes.broken_barh(bars, (stage - 0.4, 0.8), color=LANE_COLORS[kind])
                    drawn.set_gid(f"stage-{stage}-{kind}")
                    drawn.set_linewidth(0.2)
                    drawn.set_edgecolor("white")
        axes.set(xlabel=label, ylabel="stage", xlim=(0, end or 1.0), ylim=(len(lanes) - 0.5, -0.5))
        axes.set_yticks(range(len(lanes)))
        axes.grid(visible=False)
        colors = [Patch(color=c, label=kind) for kind, c in LANE_COLORS.items() if kind in shown]
        canvas.legend(
            handles=colors, fontsize=7, ncols=max(1, len(colors)), loc="outside upper right"
        )

    return draw


def _bars(lane: Lane, end: float) -> dict[str, list[tuple[float, float]]]:
    """By kind of work, the begin and the length of each bar of a lane."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in LANE_COLORS}
    last = 0.0
    for event, ready, stop in zip(lane.events, lane.ready, lane.ends, strict=True):
        if ready > last:
            found["idle"].append((last, ready - last))
        kind = event.partition(" ")[0]
        found["encode" if kind == RELEASE else kind].append((ready, stop - ready))
        last = stop
    if end > last:
        found["idle"].append((last, end - last))
    return found


def _drawn(value: float | None, log: bool) -> float:
    if value is None or not abs(value) < DRAWABLE or (log and value <= 1 / DRAWABLE):
        return math.nan
    return float(value)
