"""A chapter on the lanes of a step on stages of a pipeline. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from forkpoint.apps.report.draw import Draw, lanes_of_stages
from forkpoint.apps.report.page import Chapter, Figure, Tile
from forkpoint.apps.report.text import abbreviate
from forkpoint.plan.lanes import Lane, Lanes, read_lanes
from forkpoint.units import format_bytes

COLUMNS = ("stage", "from", "event", "begin", "ready", "end")


def lanes_chapter(path: Path) -> Chapter:
    """A chapter on a file of lanes.

    Raises ConfigError for a file that forkpoint has not written.
    """
    found = read_lanes(path)
    stages = len(found.predicted)
    tiles = [_idle_tile(found.predicted, "predicted", f"By {found.unit}, as plans are priced.")]
    if found.measured:
        how = "Waits for other stages count as idle, and so does the time of sending."
        tiles.append(_idle_tile(found.measured, "measured", how))
    if found.peak_bytes:
        peaks = ", ".join(format_bytes(round(peak)) for peak in found.peak_bytes)
        most = format_bytes(round(max(found.peak_bytes)))
        remark = f"Activations and prefix cache, not weights. By stage: {peaks}."
        tiles.append(Tile(value=most, label="predicted at the fullest stage", remark=remark))
    how = "predicted and measured" if found.measured else "predicted"
    return Chapter(
        title=abbreviate(path.name),
        subtitle=f"A step on {stages:,} stages of a pipeline, {how}.",
        tiles=tiles,
        figures=[_figure(found)],
    )


def _idle_tile(lanes: Sequence[Lane], how: str, remark: str) -> Tile:
    time = max((lane.ends[-1] for lane in lanes if lane.ends), default=0.0)
    idle = [1 - lane.busy / time if time else 0.0 for lane in lanes]
    stages = ", ".join(f"{part:.0%}" for part in idle)
    return Tile(
        value=f"{sum(idle) / len(idle):.1%}",
        label=f"of the stages' time idle, {how}",
        remark=f"{remark} By stage: {stages}.",
    )


def _figure(found: Lanes) -> Figure:
    pictures: list[Draw] = []
    rows: list[tuple[int, str, str, float, float, float]] = []
    for lanes, how, unit in (
        (found.predicted, "predicted", found.unit),
        (found.measured, "measured", "ms"),
    ):
        if not lanes:
            continue
        pictures.append(lanes_of_stages(lanes, f"{how}, {unit}"))
        for stage, lane in enumerate(lanes):
            times = zip(lane.events, lane.begins, lane.ready, lane.ends, strict=True)
            rows += [(stage, f"{how}, {unit}", *event) for event in times]
    caption = (
        "A lane a stage, the first one at the top. A stage is idle between its events and while it "
        "waits for what other stages send."
    )
    return Figure(
        name="lanes",
        title="Stages of the pipeline",
        caption=caption,
        pictures=pictures,
        columns=COLUMNS,
        rows=rows,
    )
