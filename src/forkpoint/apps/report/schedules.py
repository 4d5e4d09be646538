"""When what ran, and what it held: a plan's events as a timeline. Imports no torch."""

from collections.abc import Sequence
from typing import Any

from forkpoint.apps.replay.records import StepRecord
from forkpoint.apps.report.figure import Choice, Figure, Table
from forkpoint.plan import Plan
from forkpoint.plan.predict import cache_bytes
from forkpoint.plan.pricing.cost import Work, visible_pairs
from forkpoint.plan.program import BACKWARD, FORWARD, HEAD, IDLE, SCORE, phase_of
from forkpoint.units import GIB, KIB, MIB

MOST_EVENTS = 500
"""Drawn at most in one lane; the rest is one block that says how many they are."""

IDLE_KEY = "idle"
"""The phase and the colour of instructions for which a rank has no microbatch."""

Lane = dict[str, Any]


def measured_lane(name: str, plan: Plan, record: StepRecord) -> Lane:
    """A step that was run: measured times, and memory measured where CUDA said it."""
    events = _events(plan)
    for event, ms in zip(events, record.event_ms, strict=True):
        event["size"] = ms
    held, unit, source = _held(plan, events), "bytes", "counted"
    peak, peak_source = record.predicted_peak_bytes, "predicted"
    if plan.shape is None:
        unit = "tokens"
    if record.event_memory_bytes is not None:
        held, source = list(record.event_memory_bytes), "measured"
        peak, peak_source = record.peak_memory_bytes, "measured"
    for event, value in zip(events, held, strict=True):
        event["held"] = value
    return _lane(
        name,
        events,
        unit="ms",
        measured=True,
        rest=max(0.0, record.ms - sum(record.event_ms)),
        memory={"unit": unit, "source": source, "peak": peak, "peak_source": peak_source},
    )


def counted_lane(name: str, plan: Plan) -> Lane:
    """A plan that was not run: sizes are counted FLOPs, or tokens without a model shape."""
    unit, flops = flops_unit(plan)
    events = _events(plan)
    for event in events:
        event["size"] = float(event["places"])
        if plan.shape is not None:
            work = _work(plan, event)
            share = work.forward_flops(plan.shape)
            if event["operation"] == BACKWARD:
                share = work.step_flops(plan.shape) - share
            event["size"] = share / flops
    for event, value in zip(events, _held(plan, events), strict=True):
        event["held"] = value
    bytes_known = plan.shape is not None
    return _lane(
        name,
        events,
        unit=unit,
        measured=False,
        rest=0.0,
        memory={
            "unit": "bytes" if bytes_known else "tokens",
            "source": "counted",
            "peak": plan.predicted_peak_bytes,
            "peak_source": "predicted",
        },
    )


def flops_unit(plan: Plan) -> tuple[str, float]:
    """A unit that dense training on the plan's batch is not too many of, and its FLOPs."""
    if plan.shape is None:
        return "tokens", 1.0
    dense = plan.dense.step_flops(plan.shape)
    for unit, flops in (("PFLOP", 1e15), ("TFLOP", 1e12)):
        if dense >= 10 * flops:
            return unit, flops
    return "GFLOP", 1e9


def bytes_unit(most: int) -> tuple[str, int]:
    """A unit of which the largest of some sizes is at least one, and its bytes."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if most >= size:
            return unit, size
    return "bytes", 1


def timeline_figure(timelines: Sequence[tuple[str, list[Lane]]], left_out: int) -> Figure:
    """Timelines to choose from, by label; `left_out` more batches are not drawn."""
    lanes = [lane for _, found in timelines for lane in found]
    unit, memory = lanes[0]["unit"], lanes[0]["memory"]
    measured = lanes[0]["measured"]
    held_unit, held_size = memory["unit"], 1
    if held_unit == "bytes":
        largest = max((e["held"] for lane in lanes for e in lane["events"]), default=0)
        held_unit, held_size = bytes_unit(largest)
    rows = [
        (
            *(label, lane["name"], e["name"], e["phase"], e["tokens"], e["size"]),
            e["held"] / held_size if held_size > 1 else e["held"],
        )
        for label, lanes_of in timelines
        for lane in lanes_of
        for e in lane["events"]
    ]
    notes = []
    if not measured:
        notes.append(f"Nothing was run: lengths are counted {unit}, not times.")
    if any(e["key"].startswith(IDLE_KEY) for lane in lanes for e in lane["events"]):
        notes.append(
            "Idle: other ranks run a microbatch and this one has none. It runs one token, so that "
            "it takes part in their collectives."
        )
    if memory["source"] == "counted":
        what = "activations, prefix cache and its gradients" if memory["unit"] == "bytes" else ""
        notes.append(
            "Memory was not measured: what is shown is counted from the plan "
            + (f"({what}; not weights)." if what else "(tokens of the microbatches that are open).")
        )
    cut = sum(lane["events_left_out"] for lane in lanes)
    if cut:
        notes.append(f"{cut:,} events beyond the first {MOST_EVENTS} of a lane are one block.")
    if left_out:
        notes.append(f"Not drawn: {left_out:,} more of the batches.")
    return Figure(
        name="schedule",
        title="The schedule",
        caption="Microbatches in the order in which they run. Others read the prefix cache of a "
        "prefix, between its forward and its backward; none reads that of a leaf. "
        "Beneath: the memory held meanwhile.",
        kind="timeline",
        table=Table(
            columns=(
                *("batch", "way", "event", "phase", "tokens of the microbatch", unit),
                f"held ({held_unit}, {memory['source']})",
            ),
            rows=rows,
        ),
        choices=tuple(Choice(label=label, data=found) for label, found in timelines),
        notes=tuple(notes),
    )


def _lane(
    name: str,
    events: list[dict[str, Any]],
    *,
    unit: str,
    measured: bool,
    rest: float,
    memory: dict[str, Any],
) -> Lane:
    beyond = events[MOST_EVENTS:]
    return {
        "name": name,
        "events": events[:MOST_EVENTS],
        "events_left_out": len(beyond),
        "size_left_out": sum(event["size"] for event in beyond),
        "total": sum(event["size"] for event in events) + rest,
        "rest": rest,
        "unit": unit,
        "measured": measured,
        "memory": memory,
    }


def _events(plan: Plan) -> list[dict[str, Any]]:
    """The instructions of a plan's program, with their microbatches and the keys of their
    colours.

    An idle instruction has the index IDLE and no tokens of the batch; it runs one place.
    """
    events = []
    for instruction, name in zip(plan.program.instructions, plan.events(), strict=True):
        operation = instruction.operation
        event: dict[str, Any] = {
            "name": name,
            "operation": operation,
            "phase": IDLE_KEY,
            "key": IDLE_KEY,
            "ends_at": instruction.ends_at,
            "records": instruction.records,
            "index": instruction.microbatch,
            "tokens": 0,
            "places": 1,
        }
        if not instruction.idle:
            row = plan.microbatches[instruction.microbatch]
            kind = "prefix" if row.children else "leaf"
            event |= {
                "phase": phase_of(operation, row),
                "key": SCORE if operation == SCORE else f"{kind} {operation}",
                "tokens": row.tokens,
                "places": row.run_tokens,
            }
        events.append(event)
    return events


def _held(plan: Plan, events: list[dict[str, Any]]) -> list[int]:
    """Bytes held during each event, as counted, or tokens without a model shape.

    The cache lasts the whole step. Activations are held from a microbatch's forward to its
    backward. Those of microbatches that are offloaded or computed again are held while these run
    themselves. A score holds no activations, and the one token of an idle instruction is not
    counted.
    """
    shape = plan.shape
    always = 0 if shape is None else cache_bytes(plan, shape)
    open_rows: dict[int, int] = {}
    found = []
    for event in events:
        operation = event["operation"]
        if operation == SCORE or event["index"] == IDLE:
            found.append(always + sum(open_rows.values()))
            continue
        row = plan.microbatches[event["index"]]
        own = (
            row.run_tokens
            if shape is None
            else row.run_tokens * shape.activation_bytes(row.checkpointing)
        )
        open_rows[row.index] = own
        found.append(always + sum(open_rows.values()))
        # Of a slot that some rank computes again, no rank records the first forward.
        gone = not event["records"] or row.activations != "keep"
        if operation == BACKWARD or (operation == FORWARD and gone):
            del open_rows[row.index]
    return found


def _work(plan: Plan, event: dict[str, Any]) -> Work:
    """The work of an event's microbatch, or of the one token of an idle instruction."""
    windows = {0, *(plan.shape.windows if plan.shape else ())}
    if event["index"] == IDLE:
        return Work(tokens=1, pairs=dict.fromkeys(windows, 1), labelled=0)
    row = plan.microbatches[event["index"]]
    segments = list(row.segments)
    labelled = row.labelled if event["ends_at"] == HEAD else 0
    start, length = plan.forest.start[segments], plan.forest.length[segments]
    pairs = {window: visible_pairs(start, length, window) for window in windows}
    return Work(tokens=event["tokens"], pairs=pairs, labelled=labelled)
