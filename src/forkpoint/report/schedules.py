"""When what ran, and what it held: a plan's events as a timeline. Imports no torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from forkpoint.forest import IntArray
from forkpoint.plan import Plan
from forkpoint.plan.cost import Work, visible_pairs
from forkpoint.plan.layout import Microbatch
from forkpoint.plan.predict import cache_bytes
from forkpoint.replay.records import StepRecord
from forkpoint.report.figure import Choice, Figure, Table

MOST_EVENTS = 500
"""Drawn at most in one lane; the rest is one block that says how many they are."""

Lane = dict[str, Any]


def measured_lane(name: str, plan: Plan, record: StepRecord) -> Lane:
    """A step that was run: measured times, and memory measured where CUDA said it."""
    events = _events(plan, record.events)
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


def counted_lane(name: str, plan: Plan, labelled_of_segment: IntArray) -> Lane:
    """A plan that was not run: sizes are counted FLOPs, or tokens without a model shape."""
    unit, flops = flops_unit(plan)
    events = _events(plan, plan.events())
    for event in events:
        row = plan.microbatches[event["index"]]
        share = 1.0
        if plan.shape is not None:
            # A row that is computed again leaves its head to its second forward.
            first = event["kind"] == "F" and row.activations == "recompute"
            labelled = 0 if first else int(labelled_of_segment[list(row.segments)].sum())
            work = _row_work(plan, row, labelled)
            forward = work.forward_flops(plan.shape)
            share = work.step_flops(plan.shape) - forward if event["kind"] == "B" else forward
        event["size"] = share / flops if plan.shape is not None else float(row.run_tokens)
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
    return ("TFLOP", 1e12) if plan.dense.step_flops(plan.shape) >= 1e13 else ("GFLOP", 1e9)


def timeline_figure(timelines: Sequence[tuple[str, list[Lane]]], left_out: int) -> Figure:
    """Timelines to choose from, by label; `left_out` more batches are not drawn."""
    rows = [
        (label, lane["name"], e["name"], e["phase"], e["tokens"], e["size"], e["held"])
        for label, lanes in timelines
        for lane in lanes
        for e in lane["events"]
    ]
    lanes = [lane for _, found in timelines for lane in found]
    unit, memory = lanes[0]["unit"], lanes[0]["memory"]
    measured = lanes[0]["measured"]
    notes = []
    if not measured:
        notes.append(f"Nothing was run: lengths are counted {unit}, not times.")
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
        caption="Rows in the order in which they run. A: the forward of a row that others read. "
        "B: forward and backward of a row that none reads. C: the backward of a row that others "
        "have read. Beneath: what is held meanwhile.",
        kind="timeline",
        table=Table(
            columns=(
                *("batch", "way", "event", "phase", "tokens of the row", unit),
                f"held ({memory['unit']}, {memory['source']})",
            ),
            rows=rows,
        ),
        choices=tuple(Choice(label=label, data=found) for label, found in timelines),
        notes=tuple(notes),
    )


def labelled_of_segments(plan: Plan, loss_mask: np.ndarray, offsets: IntArray) -> IntArray:
    """[S] distinct edges of each segment whose label is trained on."""
    edges = plan.forest.token_edges(offsets)[loss_mask]
    labelled = np.zeros(plan.forest.edges + 1, np.int64)
    labelled[np.unique(edges[edges >= 0])] = 1
    total = np.concatenate([[0], np.cumsum(labelled[:-1])])
    firsts = plan.forest.edge_offsets
    return total[firsts[1:]] - total[firsts[:-1]]


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


def _events(plan: Plan, names: Sequence[str]) -> list[dict[str, Any]]:
    """Events with their row and phase. Forwards of a pass for log-probs alone have phase S."""
    row_of = {name: index for index, name in enumerate(plan.microbatch_names)}
    scored = len(names) - len(plan.events())
    events = []
    for position, name in enumerate(names):
        kind, _, microbatch_name = name.partition(" ")
        row = plan.microbatches[row_of[microbatch_name]]
        phase = "B" if not row.children else "A" if kind == "F" else "C"
        events.append(
            {
                "name": name,
                "kind": kind,
                "phase": "S" if position < scored else phase,
                "index": row.index,
                "tokens": row.tokens,
                "slots": row.run_tokens,
            }
        )
    return events


def _held(plan: Plan, events: list[dict[str, Any]]) -> list[int]:
    """Memory held during each event, as counted: bytes, or tokens without a model shape.

    The cache lasts the whole step. Activations are held from a row's forward to its backward, but
    for microbatches that are offloaded or computed again: of those, while they run themselves. A
        pass for log-probs alone holds no activations.
    """
    shape = plan.shape
    always = 0 if shape is None else cache_bytes(plan, shape)
    open_rows: dict[int, int] = {}
    found = []
    for event in events:
        row = plan.microbatches[event["index"]]
        own = (
            row.run_tokens
            if shape is None
            else row.run_tokens * shape.activation_bytes(row.checkpointing)
        )
        if event["phase"] == "S":
            found.append(always)
            continue
        if event["kind"] != "B" or row.index not in open_rows:
            open_rows[row.index] = own
        found.append(always + sum(open_rows.values()))
        if event["kind"] == "B" or (event["kind"] == "F" and row.activations != "keep"):
            del open_rows[row.index]
    return found


def _row_work(plan: Plan, row: Microbatch, labelled: int) -> Work:
    segments = list(row.segments)
    windows = {0, *(plan.shape.windows if plan.shape else ())}
    start, length = plan.forest.start[segments], plan.forest.length[segments]
    pairs = {window: visible_pairs(start, length, window) for window in windows}
    return Work(tokens=row.tokens, pairs=pairs, labelled=labelled)
