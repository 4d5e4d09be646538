"""Drawings of lanes of a pipeline with matplotlib. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from forkpoint.plan.lanes import Lane, Lanes
from forkpoint.plan.program import RELEASE

COLORS = {
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
    "svg.fonttype": "none",
    "svg.hashsalt": "forkpoint",  # equal pictures are equal files
}


def draw_lanes(path: Path, found: Lanes) -> None:
    """Draw a lane for each stage, the first at the top: predicted and, if measured, measured below.

    The suffix of the path is the format, such as .svg or .png. In an SVG, bars of stage 0 that are
    predicted forwards are the group "predicted-stage-0-forward".
    """
    parts = [("predicted", found.unit, found.predicted), ("measured", "ms", found.measured)]
    parts = [part for part in parts if part[2]]
    with matplotlib.rc_context(STYLE):
        height = len(parts) * (1.2 + 0.32 * len(found.predicted))
        figure = Figure(figsize=(6.5, height), layout="constrained")
        FigureCanvasAgg(figure)
        shown = set[str]()
        for axes, (how, unit, lanes) in zip(
            figure.subplots(len(parts), squeeze=False)[:, 0], parts, strict=True
        ):
            shown |= _draw(axes, how, lanes)
            axes.set_xlabel(f"{how}, {unit}")
        colors = [Patch(color=color, label=k) for k, color in COLORS.items() if k in shown]
        figure.legend(handles=colors, fontsize=7, ncols=len(COLORS), loc="outside upper right")
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata)


def idle_parts(lanes: Sequence[Lane]) -> list[float]:
    """For each stage, the part of the step's time in which it runs nothing, from 0 to 1."""
    end = _end(lanes)
    return [1 - lane.busy / end if end else 0.0 for lane in lanes]


def _draw(axes: Axes, how: str, lanes: Sequence[Lane]) -> set[str]:
    """Draw lanes, and return their kinds of bars."""
    end, shown = _end(lanes), set[str]()
    for stage, lane in enumerate(lanes):
        for kind, bars in _bars(lane, end).items():
            if bars:
                shown.add(kind)
                drawn = axes.broken_barh(bars, (stage - 0.4, 0.8), color=COLORS[kind])
                drawn.set_gid(f"{how}-stage-{stage}-{kind}")
                drawn.set_linewidth(0.2)
                drawn.set_edgecolor("white")
    axes.set(ylabel="stage", xlim=(0, end or 1.0), ylim=(len(lanes) - 0.5, -0.5))
    axes.set_yticks(range(len(lanes)))
    return shown


def _end(lanes: Sequence[Lane]) -> float:
    return max((lane.ends[-1] for lane in lanes if lane.ends), default=0.0)


def _bars(lane: Lane, end: float) -> dict[str, list[tuple[float, float]]]:
    """For each kind of work, begin and length of the bars of a lane."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in COLORS}
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
