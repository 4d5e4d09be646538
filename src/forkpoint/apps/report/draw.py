"""Pictures of a report by matplotlib: SVG for the page, PNG and SVG for papers."""

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from forkpoint.apps.report.text import abbreviate, visible
from forkpoint.tree.forest import IntArray

Draw = Callable[[Figure], None]
"""Draws one picture into an empty figure."""
COLORS = {"shared": "#1f66c7", "dense": "#7d8794", "bound": "#b45f06", "difference": "#7a4fb5"}
PHASES = {
    "score": "#c9a227",
    "prefix forward": "#0f8a7e",
    "leaf forward": "#86b3ea",
    "leaf backward": "#1f66c7",
    "prefix recompute": "#bfa3e0",
    "leaf recompute": "#d9c7ee",
    "prefix backward": "#7a4fb5",
    "other": "#ccd3db",
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
DRAWABLE = 1e100
"""Larger numbers are not drawn: their axes would overflow."""


def rendered(draw: Draw, kind: str) -> bytes:
    """A picture as the content of a file, "svg" or "png". Equal pictures are equal files."""
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # The font may lack characters of names: they are boxes in a PNG, and text in an SVG.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        canvas = Figure(figsize=(6.5, 2.8), layout="constrained")
        FigureCanvasAgg(canvas)
        draw(canvas)
        metadata = {"Date": None} if kind == "svg" else None
        canvas.savefig(file, format=kind, dpi=200, metadata=metadata)
    return file.getvalue()


def write_plots(figures: Mapping[str, Sequence[Draw]], folder: Path) -> list[Path]:
    """Write every picture as PNG and as SVG, and return the paths.

    `figures`: pictures by the beginning of their files' names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, pictures in figures.items():
        stem = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:MAX_STEM_CHARACTERS]
        for index, picture in enumerate(pictures):
            for kind in ("png", "svg"):
                path = folder / f"{stem}-{index}.{kind}"
                path.write_bytes(rendered(picture, kind))
                written.append(path)
    return written


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
            # matplotlib writes powers of ten in TeX, which parse_math leaves as it is.
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_formatter("")
        axes.set(xlabel="step", ylabel=label)
        axes.locator_params(axis="x", integer=True)
        if len(shown) > 1 or band is not None:
            axes.legend(fontsize=7)

    return draw


def _drawn(value: float | None, log: bool) -> float:
    fits = value is not None and abs(value) < DRAWABLE and (not log or value > 1 / DRAWABLE)
    return float(value) if fits and value is not None else math.nan


def forest(
    title: str, start: IntArray, length: IntArray, lanes: IntArray, names: Mapping[float, str]
) -> Draw:
    """A band for each segment, to scale, one lane a rollout.

    Args:
        title: of the picture.
        start: first position of each segment, in tokens; int64 [S].
        length: tokens of each segment; int64 [S].
        lanes: first lane of each segment, and one past its last; int64 [S, 2].
        names: names of groups by the lane in their middle.
    """

    def draw(canvas: Figure) -> None:
        axes = canvas.add_subplot()
        begin, end = lanes.T
        gap = 0.04 * (end - begin)
        left, right, top, bottom = start, start + length, begin + gap, end - gap
        corners = np.array([[left, top], [right, top], [right, bottom], [left, bottom]])
        shared = end - begin > 1
        for chosen, color, name in (
            (shared, "#3f82d6", "shared by several rollouts"),
            (~shared, "#a9c8ee", "of one rollout"),
        ):
            bands = list(corners[:, :, chosen].transpose(2, 0, 1))
            look: Any = {"facecolors": color, "edgecolors": "white", "linewidths": 0.4}
            axes.add_collection(PolyCollection(bands, label=name, **look))
        axes.autoscale_view()
        axes.set(xlabel="position (tokens)", ylabel="rollouts", title=_one_line(title))
        if names:
            axes.set_yticks(list(names), [_one_line(n, 24) for n in names.values()], fontsize=7)
        axes.invert_yaxis()
        axes.grid(False)
        axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))

    return draw


def schedule(title: str, lanes: Mapping[str, Sequence[tuple[str, float]]]) -> Draw:
    """The events of steps on one scale of time: by lane, each event's phase and milliseconds."""

    def draw(canvas: Figure) -> None:
        axes = canvas.add_subplot()
        named: set[str] = set()
        for place, events in enumerate(lanes.values()):
            ends = list(accumulate(ms for _, ms in events))
            for phase, color in PHASES.items():
                spans = [
                    (end - ms, ms)
                    for end, (of, ms) in zip(ends, events, strict=True)
                    if of == phase and ms
                ]
                if spans:
                    look: Any = {"facecolors": color, "edgecolors": "white", "linewidth": 0.4}
                    label = "" if phase in named else phase
                    axes.broken_barh(spans, (place - 0.3, 0.6), label=label, **look)
                    named.add(phase)
        axes.set_yticks(range(len(lanes)), list(lanes))
        axes.invert_yaxis()
        axes.grid(False)
        axes.set(xlabel="ms", title=_one_line(title))
        axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))

    return draw


def _one_line(text: str, most: int = MAX_TITLE_CHARACTERS) -> str:
    """Text from a file, as one line that XML can hold."""
    return abbreviate(visible(" ".join(text.split())), most)
