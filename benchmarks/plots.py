"""Figures drawn from rows of measurements, and from nothing else."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tyro.conf import Positional, arg

from forkpoint.apps.cli.options import Flag
from forkpoint.apps.cli.output import Output
from forkpoint.apps.report.text import abbreviate, visible
from forkpoint.errors import ConfigError

Row = dict[str, Any]
OUT_OF_MEMORY = "out of memory"
PEAK = "peak of phase leaf drained over dense"
MOST_CASE_CHARACTERS = 72
COLOURS = (
    *("#1f77b4", "#d95f02", "#1b9e77", "#7570b3"),
    *("#e7298a", "#666666", "#a6761d", "#66c2a5"),
)


def read_rows(files: Iterable[Path]) -> list[Row]:
    """Rows of files that benchmarks wrote.

    Raises:
        ConfigError: a line is not a row.
    """
    rows: list[Row] = []
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            try:
                row = json.loads(line)
                texts = [row[name] for name in ("bench", "case", "metric")]
                assert all(isinstance(text, str) for text in texts)
                assert math.isfinite(row["value"])
            except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
                raise ConfigError(
                    f"{file}, line {number} is not a row of a benchmark "
                    f"({type(error).__name__}: {error}). Give files that a benchmark wrote."
                ) from None
            # It is a label of an axis.
            case = abbreviate(visible(" ".join(row["case"].split())), MOST_CASE_CHARACTERS)
            rows.append({"bound": None, "note": None, **row, "case": case})
    return rows


def latest(rows: list[Row]) -> list[Row]:
    """Of rows of one figure of one case the last, in the order of the cases' first rows.

    A row whose note begins with "void" does not count. A case that ran out of memory has no other
    figures than those that were measured after that.
    """
    found: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        if (row.get("note") or "").startswith("void"):
            continue
        bench, case, metric = row["bench"], row["case"], row["metric"]
        if metric == OUT_OF_MEMORY:
            found = {key: r for key, r in found.items() if key[:2] != (bench, case)}
        else:
            found.pop((bench, case, OUT_OF_MEMORY), None)
        found[bench, case, metric] = row
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw figures from the rows that benchmarks wrote.

    Attributes:
        files: Files of rows.
        output: The folder for the figures, as SVG.
        json: Print one line of JSON and nothing else.
    """

    files: Positional[Annotated[tuple[Path, ...], arg(metavar="FILE...")]]
    output: Path = Path("figures")
    json: Flag = False

    def run(self) -> int:
        drawn = draw_all(read_rows(self.files), self.output)
        out = Output(json_only=self.json)
        out.show(*(f"drawn: {path}" for path in drawn))
        out.result({"benchmark": "plot", "figures": drawn})
        return 0


def draw_all(rows: list[Row], folder: Path) -> list[Path]:
    """One SVG for each figure that the rows have data for; equal rows give equal files.

    Raises:
        ConfigError: there is none.
    """
    last = latest(rows)
    drawn = []
    # Names of cases may hold dollar signs.
    style: Any = {"text.parse_math": False, "svg.hashsalt": "forkpoint", "svg.fonttype": "none"}
    for name, draw in (("step-grid", _step_grid), ("memory", _memory), ("capacity", _capacity)):
        with rc_context(style):
            figure = draw(last)
            if figure is not None:
                folder.mkdir(parents=True, exist_ok=True)
                drawn.append(folder / f"{name}.svg")
                FigureCanvasAgg(figure)
                figure.savefig(drawn[-1], metadata={"Date": None})
    if not drawn:
        raise ConfigError("these rows hold nothing to draw: no step-grid, memory or capacity.")
    return drawn


def _step_grid(rows: list[Row]) -> Figure | None:
    """Speed-up over N for each split, the counted bound as a dashed line.

    What ran out of memory is a cross at 0.
    """
    found: dict[str, list[tuple[int, float, float]]] = {}
    failed: dict[str, list[int]] = {}
    for row in rows:
        if row["bench"] != "step-grid" or row["metric"] not in ("speed-up", OUT_OF_MEMORY):
            continue
        mode, split, count = row["case"].split(" ")
        rollouts = int(count.removeprefix("N="))
        if row["metric"] == OUT_OF_MEMORY:
            failed.setdefault(split, []).append(rollouts)
        else:
            point = (rollouts, row["value"], row["bound"])
            found.setdefault(f"{mode} {split}", []).append(point)
    if not found:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    splits = sorted({*failed, *(name.split(" ")[1] for name in found)})
    for name, points in sorted(found.items()):
        counts, values, bounds = zip(*sorted(points), strict=True)
        mode, split = name.split(" ")
        colour = COLOURS[splits.index(split) % len(COLOURS)]
        filled = colour if mode == "compiled" else "white"
        axes.plot(counts, values, marker="o", color=colour, markerfacecolor=filled, label=name)
        # Marked too: the line of a single cell has no length.
        axes.plot(counts, bounds, "--_", color=colour, linewidth=1, markersize=9)
    for split, counts in failed.items():
        colour = COLOURS[splits.index(split) % len(COLOURS)]
        label = f"{split}: out of memory"
        axes.plot(counts, [0.0] * len(counts), "x", color=colour, label=label)
    every = sorted({point[0] for points in found.values() for point in points})
    every = sorted({*every, *(count for counts in failed.values() for count in counts)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(every, [str(count) for count in every])
    axes.set_xlabel("rollouts of a prompt")
    axes.set_ylabel("step, times dense (dashed: counted bound)")
    axes.legend(fontsize=7)
    return figure


def _memory(rows: list[Row]) -> Figure | None:
    """Peaks of phase leaf above weights and gradients, over dense, with the bar of each split."""
    found = [r for r in rows if r["bench"] == "memory" and r["metric"] == PEAK]
    if not found:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    names = [row["case"] for row in found]
    axes.barh(names, [row["value"] for row in found], color=COLOURS[0])
    bounds = [row["bound"] for row in found]
    axes.plot(bounds, names, "k|", markersize=14, label="share of suffix and boundary")
    axes.invert_yaxis()
    axes.set_xlabel("peak of phase leaf over dense, without weights")
    axes.legend(fontsize=8)
    return figure


def _capacity(rows: list[Row]) -> Figure | None:
    """Largest totals, one part of the figure for each kind of comparison.

    Ways with and without checkpointing or chains do not compare, and a part that lacks dense or
    shared says so.
    """
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if row["bench"] == "capacity" and row["metric"] == "largest total":
            kinds.setdefault(row["case"].partition(":")[0], []).append(row)
    if not kinds:
        return None
    heights = [len(found) for found in kinds.values()]
    figure = Figure(figsize=(7, 0.5 * sum(heights) + 1.3 * len(kinds)), layout="constrained")
    parts = figure.subplots(
        len(kinds), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axes, (kind, found) in zip(parts[:, 0], kinds.items(), strict=True):
        ways = [row["case"].partition(":")[2].strip() or row["case"] for row in found]
        axes.barh(ways, [row["value"] for row in found], color=COLOURS[2])
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize=7)
        dense = [way.startswith("dense") for way in ways]
        lacking = "" if any(dense) and not all(dense) else " (nothing to compare with yet)"
        axes.set_title(f"{kind}{lacking}", fontsize=9, loc="left")
    parts[-1, 0].set_xlabel("largest total length that trained, tokens")
    return figure
