"""The figure of shared-prefix attention, drawn from its rows and from nothing else.

A bar is a way of attending to a shared prefix, its length the rate on the pairs of query and key
that a token may see: the same work for every way, so that the bars compare times. Ways that were
not measured in a case have no bar there.
"""

import re
from collections import defaultdict
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

PASSES = ("forward", "backward")
# Ours first, then dense, then other ways to share; a way's colour is its kernel's family.
WAYS = {
    "fa4": ("shared, FlashAttention-4", "#1f5fa8"),
    "cudnn": ("shared, cuDNN", "#4d94d6"),
    "fa2": ("shared, FlashAttention-2", "#9cc7ec"),
    "flex": ("shared, FlexAttention", "#c98b2b"),
    "copied_keys_fa4": ("keys copied per response, FlashAttention-4", "#5d8a55"),
    "copied_keys_fa2": ("keys copied per response, FlashAttention-2", "#a5c69e"),
    "dense_fa4": ("dense, FlashAttention-4", "#5a5a5a"),
    "dense_cudnn": ("dense, cuDNN", "#8c8c8c"),
    "dense_fa2": ("dense, FlashAttention-2", "#bdbdbd"),
}

Rates = dict[str, dict[str, dict[str, float]]]


def rates(rows: list[dict[str, Any]], suite: str) -> Rates:
    """TFLOP/s on visible pairs: by pass, case and way, in the order of the rows.

    A case that was measured by several commands is shown as the last one did: times compare only
    within one run.
    """
    last = {row["case"]: row["command"] for row in rows}
    times: dict[str, dict[str, dict[str, float]]] = {p: defaultdict(dict) for p in PASSES}
    work: dict[str, dict[str, float]] = {p: {} for p in PASSES}
    for row in rows:
        if not row["case"].startswith(f"{suite}/") or row["command"] != last[row["case"]]:
            continue
        case = row["case"].split("/", 1)[1]
        way, _, metric = row["metric"].rpartition("/")
        name, _, rate = metric.partition("_")
        if metric in PASSES and way in WAYS:
            times[metric][case][way] = row["value"]
        elif name in PASSES and rate == "rate" and way in times[name][case]:
            # TFLOP/s times ms is GFLOP: the same whichever of our kernels it is taken from.
            work[name][case] = row["value"] * times[name][case][way]
    return {
        p: {
            case: {way: work[p][case] / ms for way, ms in ways.items()}
            for case, ways in times[p].items()
            if case in work[p]
        }
        for p in PASSES
    }


def draw(rows: list[dict[str, Any]], suite: str) -> Figure | None:
    """Bars of all cases of a suite; None where the rows have none."""
    measured = [row for row in rows if row["bench"] == "attention"]
    found = rates(measured, suite)
    cases = list(found["forward"])
    if not cases:
        return None
    ways = [w for w in WAYS if any(w in found[p].get(c, {}) for p in PASSES for c in cases)]
    heights = [sum(w in found["forward"][c] for w in ways) + 1 for c in cases]
    size = (11, 0.21 * sum(heights) + 1.9)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, name in zip(axes, PASSES, strict=True):
        y, ticks = 0.0, []
        for case, height in zip(cases, heights, strict=True):
            ticks.append(y + (height - 2) / 2)
            for way in (w for w in ways if w in found["forward"][case]):
                rate = found[name].get(case, {}).get(way)
                if rate is not None:
                    axis.barh(y, rate, 0.9, color=WAYS[way][1])
                    axis.text(rate, y, f" {rate:,.0f}", va="center", fontsize=7)
                y += 1
            y += 1
        axis.set_yticks(ticks, [readable(c) for c in cases], fontsize=8)
        axis.set_xlabel(f"{name}: TFLOP/s on visible pairs")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12, y=0.01)
    axes[0].invert_yaxis()
    handles = [Patch(color=WAYS[w][1]) for w in ways]
    figure.legend(handles, [WAYS[w][0] for w in ways], loc="outside lower center", ncols=3)
    devices = sorted({row["device"] for row in measured})
    figure.suptitle(f"Attention over a shared prefix, {suite} shapes, {devices[0]}")
    return figure


def readable(case: str) -> str:
    """P16384-N9-R64-H16K4D256-bfloat16, on two lines."""
    found = re.fullmatch(r"(.*)-(H\d+K\d+D\d+)-(\w+)", case)
    if not found:
        return case
    shape = re.sub(r"\d+", lambda n: f" {int(n[0]):,}", found[1]).replace("-", "  ")
    return f"{shape}\n{found[2]} {found[3]}"
