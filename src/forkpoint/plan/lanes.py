"""Lanes of a step on pipeline stages: the events of each stage with their times. Imports no torch.

A lane has the events of a training pass, at predicted times or at measured ones. Lanes are saved as
a file of JSON, which `forkpoint report` draws.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

from forkpoint.errors import ConfigError
from forkpoint.plan.plan import CostUnit, Plan
from forkpoint.plan.program import BACKWARD, ENCODE, FORWARD, RECOMPUTE, RELEASE, SCORE
from forkpoint.rollouts.disk import write_file
from forkpoint.rollouts.schema import SchemaError, parse_json, read, read_small

KIND = "lanes of a pipeline"
MOST_BYTES = 64 << 20
MOST_TIME = 1e30
"""Largest time in a file of lanes. matplotlib cannot draw axes up to the largest float."""
OPERATIONS = (FORWARD, RECOMPUTE, BACKWARD, ENCODE, RELEASE)
"""First words of events."""


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


def _check_lane(lane: Lane, field: str) -> None:
    counts = {len(lane.events), len(lane.begins), len(lane.ready), len(lane.ends)}
    if len(counts) > 1:
        raise SchemaError(f"{field} has lists of {sorted(counts)} entries; they have one an event")
    last = 0.0
    for begin, ready, end in zip(lane.begins, lane.ready, lane.ends, strict=True):
        if not last <= begin <= ready <= end:
            raise SchemaError(f"{field} has times that are not in order at {begin:g}")
        last = end
    if last > MOST_TIME:
        raise SchemaError(f"{field} has the time {last:g}; times are at most {MOST_TIME:g}")
    for event in lane.events:
        if event.partition(" ")[0] not in OPERATIONS:
            raise SchemaError(
                f"{field} has the event {event!r}; it takes those of {', '.join(OPERATIONS)}"
            )


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Lanes of a step, from the first stage to the last."""

    unit: CostUnit
    """Unit of predicted times, that of the plan's prices."""
    predicted: tuple[Lane, ...]
    """Lanes with predicted times."""
    measured: tuple[Lane, ...] = ()
    """Lanes with measured times in milliseconds; empty if the step was not run."""
    peak_bytes: tuple[float, ...] = ()
    """Predicted peak of activations and prefix cache of each stage, in bytes."""

    def save(self, path: Path | str) -> None:
        """Write a file that `forkpoint report` draws.

        Raises ConfigError if the file cannot be written.
        """
        try:
            path = Path(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps({"kind": KIND, "lanes": asdict(self)}).encode())
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}. Give another path.") from None


@dataclass(frozen=True)
class _File:
    kind: Literal["lanes of a pipeline"]
    lanes: Lanes


def read_lanes(path: Path) -> Lanes:
    """Read lanes from a file.

    Raises ConfigError, naming file and field, if `Lanes.save` did not write the file.
    """
    try:
        lanes = read(_File, parse_json(read_small(path, MOST_BYTES)), "").lanes
        stages = len(lanes.predicted)
        if not stages or {len(lanes.measured), len(lanes.peak_bytes)} - {0, stages}:
            raise SchemaError(
                f"lanes has {stages} predicted lanes, {len(lanes.measured)} measured ones and "
                f"{len(lanes.peak_bytes)} peaks; it has one of each for a stage"
            )
        for stage, lane in enumerate((*lanes.predicted, *lanes.measured)):
            _check_lane(lane, f"lane {stage}")
        return lanes
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}. Check the path.") from None
    except SchemaError as error:
        raise ConfigError(
            f"{path} is not a file of lanes: {error}. Give one that forkpoint plan --lanes or "
            "stats.lanes.save has written."
        ) from None


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
    return Lanes(
        unit=plan.cost_unit,
        predicted=tuple(found),
        measured=tuple(measured),
        peak_bytes=schedule.peak_bytes,
    )


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
