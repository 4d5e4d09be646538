"""Lanes of a step on pipeline stages: the events of each stage with their times. Imports no torch.

A lane has the events of a training pass, at predicted times or at measured ones. Lanes are saved as
Chrome trace events, which Perfetto (https://ui.perfetto.dev) draws.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from forkpoint.errors import ConfigError
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import BACKWARD, RELEASE, SCORE

SHOWN_US = 1e6
"""Length of the predicted step in a file, in microseconds. Predicted times are not in seconds."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Events of one stage, in order. A stage idles between events, and waits from the begin of an
    event until its inputs are ready."""

    events: tuple[str, ...]
    """Descriptions of the events, such as "forward leaf 1" (`Plan.events`)."""
    begins: tuple[float, ...]
    ready: tuple[float, ...]
    """Time at which the inputs from other stages had arrived."""
    ends: tuple[float, ...]

    @property
    def busy(self) -> float:
        """Time in which the stage runs something."""
        return sum(end - ready for ready, end in zip(self.ready, self.ends, strict=True))


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Lanes of a step, from the first stage to the last."""

    predicted: tuple[Lane, ...]
    """Lanes with predicted times, in the unit of the plan's prices (`Plan.cost_unit`)."""
    measured: tuple[Lane, ...] = ()
    """Lanes with measured times in milliseconds; empty if the step was not run."""

    def save(self, path: Path | str) -> None:
        """Write a JSON file of Chrome trace events. The predicted step lasts one second in it.

        Raises ConfigError if the file cannot be written.
        """
        last = max((lane.ends[-1] for lane in self.predicted if lane.ends), default=0.0)
        scale = SHOWN_US / last if last else 0.0
        found = [*_trace_events("predicted", 0, self.predicted, scale)]
        found += _trace_events("measured", 1, self.measured, 1e3)
        try:
            Path(path).write_text(json.dumps({"traceEvents": found}), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}. Give another path.") from None


def _trace_events(
    name: str, process: int, lanes: Sequence[Lane], scale: float
) -> Iterator[dict[str, Any]]:
    """Trace events of lanes as threads of one process. `scale`: microseconds of a lane's unit."""
    if not lanes:
        return
    where: dict[str, Any] = {"pid": process, "tid": 0}
    yield {**where, "ph": "M", "name": "process_name", "args": {"name": name}}
    for stage, lane in enumerate(lanes):
        where["tid"] = stage
        yield {**where, "ph": "M", "name": "thread_name", "args": {"name": f"stage {stage}"}}
        for event, ready, end in zip(lane.events, lane.ready, lane.ends, strict=True):
            times = {"ts": ready * scale, "dur": (end - ready) * scale}
            yield {**where, "ph": "X", "name": event, "cat": event.partition(" ")[0], **times}


def lanes_of(plan: Plan, measured: Sequence[Lane] = ()) -> Lanes:
    """Lanes of a plan on pipeline stages, with its predicted times. Times of encoders are in
    forwards and backwards of the first stage.

    Args:
        plan: a plan with `Plan.pipeline`.
        measured: by stage; empty if the step was not run.
    """
    schedule = plan.pipeline
    assert schedule is not None, "the plan is of no pipeline"
    units = {(u[-1].slot, u[-1].operation == BACKWARD): u for u in plan.program.units}
    found = []
    for order, begins, ends in zip(schedule.orders, schedule.begins, schedule.ends, strict=True):
        took = {entry: e - b for entry, b, e in zip(order, begins, ends, strict=True)}
        events, starts, stops = list[str](), list[float](), list[float]()
        for (slot, is_backward), begin, end in zip(order, begins, ends, strict=True):
            unit = units[slot, is_backward]
            # A recompute takes as long as the forward. The backward takes the rest of the time of
            # the unit.
            again = min(took[slot, False], end - begin) if len(unit) > 1 else 0.0
            middle = [begin + again] * (len(unit) - 1)
            events += map(plan.event, unit)
            starts += [begin, *middle]
            stops += [*middle, end]
        lane = Lane(
            events=tuple(events), begins=tuple(starts), ready=tuple(starts), ends=tuple(stops)
        )
        found.append(lane)
    return Lanes(predicted=tuple(found), measured=tuple(measured))


def measured_lane(
    events: Sequence[str], event_ms: Sequence[float], wait_ms: Sequence[float]
) -> Lane:
    """The measured lane of the training pass of a step, with consecutive events.

    `wait_ms`: for each event, the time until inputs from other stages had arrived.
    """
    scores = (at for at, event in enumerate(events, 1) if event.startswith(SCORE))
    first = max(scores, default=0)
    while first and events[first : first + 1] and events[first].startswith(RELEASE):
        first += 1  # of features that scores have read
    ends = tuple(accumulate(event_ms[first:]))
    begins = (0.0, *ends[:-1])[: len(ends)]
    ready = (begin + wait for begin, wait in zip(begins, wait_ms[first:], strict=True))
    return Lane(
        events=tuple(events[first:]),
        begins=begins,
        ready=tuple(map(min, ready, ends)),
        ends=ends,
    )
