"""A batch and its plans as pictures and tables: forest, groups, schedule. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from forkpoint.apps.replay.records import StepRecord
from forkpoint.apps.report.figure import (
    Cell,
    Event,
    Figure,
    ForestPicture,
    Lane,
    SchedulePicture,
    Table,
)
from forkpoint.apps.report.text import abbreviate
from forkpoint.plan import Plan
from forkpoint.plan.predict import cache_bytes
from forkpoint.plan.pricing.cost import Work, visible_pairs
from forkpoint.plan.program import BACKWARD, FORWARD, HEAD, IDLE, SCORE
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.units import GIB, KIB, MIB

MAX_BATCHES = 4
"""That are drawn; a report says how many others there are."""
MAX_SEGMENTS = 5_000
"""That are drawn of one forest."""
MAX_EVENTS = 500
"""That are drawn of one lane."""
MAX_NAMED_GROUPS = 12
"""That a forest has room to name."""
MAX_NAME_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch that is drawn."""

    label: str
    plan: Plan
    group_ids: Sequence[str | None]
    """Of each rollout."""
    prompt_tokens: Sequence[int] | None
    """Of each rollout, the tokens before the first trained one; None if masks are not known."""
    schedule: SchedulePicture


def group_names(batch: RolloutBatch) -> list[str]:
    """The group of each rollout; without a group_id, the number of its prompt in the batch."""
    return [
        f"prompt {number}" if name is None else name
        for name, number in zip(batch.group_ids, batch.group_index.tolist(), strict=True)
    ]


# The forest and its groups
# ------------------------------------------------------------


def forest_figure(batches: Sequence[Batch], left_out: int) -> Figure:
    """Segments of the batches; `left_out` more batches are not drawn."""
    rows: list[tuple[Cell, ...]] = []
    notes = []
    for batch in batches:
        forest, names = batch.plan.forest, batch.plan.microbatch_names
        lanes = forest.owner_end - forest.owner_begin
        for row in batch.plan.microbatches:
            for segment in row.segments:
                start, length = int(forest.start[segment]), int(forest.length[segment])
                rows.append((batch.label, start, length, int(lanes[segment]), names[row.index]))
        if len(forest) > MAX_SEGMENTS:
            notes.append(
                f"{batch.label}: of {len(forest):,} segments the {MAX_SEGMENTS:,} with the most "
                "tokens times rollouts are drawn."
            )
    return Figure(
        name="forest",
        title="What was shared",
        caption="Each band is a segment, a run of tokens that the same rollouts share. Its length "
        "is what is computed, its width the rollouts through it, so that its area is what dense "
        "training would compute. A segment is also cut where its microbatch ends.",
        table=Table(
            columns=("batch", "first position (tokens)", "tokens", "rollouts", "microbatch"),
            rows=rows,
        ),
        pictures=tuple(forest_picture(batch) for batch in batches),
        notes=(*notes, *_not_drawn(left_out)),
    )


def forest_picture(batch: Batch) -> ForestPicture:
    """The segments with the most tokens times rollouts, and the groups beside their lanes."""
    forest = batch.plan.forest
    area = forest.length * (forest.owner_end - forest.owner_begin)
    kept = np.sort(np.argsort(-area, kind="stable")[:MAX_SEGMENTS])
    lanes: dict[str | None, list[int]] = {}
    for lane, rollout in enumerate(forest.order.tolist()):
        lanes.setdefault(batch.group_ids[rollout], []).append(lane)
    named = [(_name(group), float(np.mean(of)) + 0.5) for group, of in lanes.items()]
    return ForestPicture(
        label=batch.label,
        start=forest.start[kept],
        length=forest.length[kept],
        begin=forest.owner_begin[kept],
        end=forest.owner_end[kept],
        groups=tuple(named) if len(named) <= MAX_NAMED_GROUPS else (),
    )


def groups_figure(batches: Sequence[Batch], left_out: int) -> Figure:
    """The groups of the batches; `left_out` more batches are not listed."""
    rows: list[tuple[Cell, ...]] = []
    for batch in batches:
        forest = batch.plan.forest
        reach = forest.start + forest.length
        lane_of = {rollout: lane for lane, rollout in enumerate(forest.order.tolist())}
        members: dict[str | None, list[int]] = {}
        for rollout in sorted(lane_of):
            members.setdefault(batch.group_ids[rollout], []).append(rollout)
        for group, of in members.items():
            lanes = [lane_of[rollout] for rollout in of]
            through = (forest.owner_begin <= min(lanes)) & (forest.owner_end > max(lanes))
            # A rollout shares with nobody what it shares with itself.
            shared = int(reach[through].max(initial=0)) if len(of) > 1 else 0
            prompt: Cell = None
            if batch.prompt_tokens is not None:
                lengths = sorted({batch.prompt_tokens[rollout] for rollout in of})
                prompt = lengths[0]
                if len(lengths) > 1:
                    prompt = f"{lengths[0]:,} to {lengths[-1]:,}"
            rows.append((batch.label, _name(group), len(of), prompt, shared))
    return Figure(
        name="groups",
        title="Groups",
        caption="A group is the rollouts of one prompt. A prompt is the tokens before the first "
        "trained one; a replay does not keep which are trained.",
        table=Table(
            columns=(
                *("batch", "group", "rollouts", "prompt (tokens)"),
                "shared by the whole group (tokens)",
            ),
            rows=rows,
        ),
        notes=_not_drawn(left_out),
    )


def _name(group: str | None) -> str:
    return "no group" if group is None else abbreviate(group, MAX_NAME_CHARACTERS)


def _not_drawn(left_out: int) -> tuple[str, ...]:
    return (f"Not drawn: {left_out:,} more of the batches.",) if left_out else ()


# The schedule
# ------------------------------------------------------------


def schedule_figure(batches: Sequence[Batch], left_out: int) -> Figure:
    """Schedules of the batches; `left_out` more batches are not drawn."""
    pictures = [batch.schedule for batch in batches]
    first = pictures[0]
    events = [(p, lane, e) for p in pictures for lane in p.lanes for e in lane.events]
    rows = [
        (p.label, lane.name, e.name, e.phase, e.tokens, e.size, e.held) for p, lane, e in events
    ]
    notes = []
    if first.unit != "ms":
        notes.append(f"Nothing was run: lengths are counted {first.unit}, not times.")
    if any(event.phase == "idle" for _, _, event in events):
        notes.append(
            "Idle: other ranks run a microbatch and this one has none. It runs one token, so that "
            "it takes part in their collectives."
        )
    if first.held_source == "counted":
        held = "activations, prefix cache and its gradients, not weights"
        if first.held_unit == "tokens":
            held = "tokens of the microbatches that are open"
        notes.append(f"Memory was not measured. It is counted from the plan: {held}.")
    if any(len(lane.events) == MAX_EVENTS for p in pictures for lane in p.lanes):
        notes.append(f"Of a lane at most the first {MAX_EVENTS} events are drawn.")
    return Figure(
        name="schedule",
        title="The schedule",
        caption="Microbatches in the order in which they run, and the memory held meanwhile. "
        "Others read the cache of a prefix between its forward and its backward; none reads that "
        "of a leaf.",
        table=Table(
            columns=(
                *("batch", "plan", "event", "phase", "tokens of the microbatch", first.unit),
                f"held ({first.held_unit}, {first.held_source})",
            ),
            rows=rows,
        ),
        pictures=tuple(pictures),
        notes=(*notes, *_not_drawn(left_out)),
    )


def measured_schedule(label: str, steps: Sequence[tuple[str, Plan, StepRecord]]) -> SchedulePicture:
    """Times of steps that were run, by the name of their lane; memory where CUDA measured it."""
    lanes = [(name, plan, list(record.event_ms)) for name, plan, record in steps]
    rests = [max(0.0, record.ms - sum(record.event_ms)) for _, _, record in steps]
    measured = [record.event_memory_bytes for _, _, record in steps]
    if all(held is not None for held in measured):
        held, source = [list(of or ()) for of in measured], "measured"
    else:
        held, source = [_held(plan) for _, plan, _ in steps], "counted"
    return _schedule(label, "ms", lanes, rests, held, source)


def counted_schedule(label: str, plans: Sequence[tuple[str, Plan]]) -> SchedulePicture:
    """Plans that were not run: sizes are counted FLOPs, or tokens without a model's shape."""
    unit, flops = "tokens", 1.0
    shape = plans[0][1].shape
    if shape is not None:
        total = plans[0][1].dense.step_flops(shape)
        units = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9))
        unit, flops = next((u for u in units if total >= 10 * u[1]), units[-1])
    lanes = [(name, plan, [size / flops for size in _counted_sizes(plan)]) for name, plan in plans]
    held = [_held(plan) for _, plan in plans]
    return _schedule(label, unit, lanes, [0.0] * len(lanes), held, "counted")


def _schedule(
    label: str,
    unit: str,
    lanes: Sequence[tuple[str, Plan, list[float]]],
    rests: Sequence[float],
    held: Sequence[list[int]],
    source: Literal["measured", "counted"],
) -> SchedulePicture:
    """Lanes from their names, plans, sizes of events and memory held during each."""
    held_unit, divisor = "tokens", 1
    if source == "measured" or lanes[0][1].shape is not None:
        held_unit, divisor = _bytes_unit(max(max(of, default=0) for of in held))
    made = []
    for (name, plan, sizes), rest, of in zip(lanes, rests, held, strict=True):
        instructions, names = plan.program.instructions, plan.events()
        events = [
            Event(
                name=names[n],
                phase=_phase(plan, instruction),
                tokens=0 if instruction.idle else plan.microbatches[instruction.microbatch].tokens,
                size=sizes[n],
                held=of[n] / divisor,
            )
            for n, instruction in enumerate(instructions[:MAX_EVENTS])
        ]
        made.append(Lane(name=name, events=tuple(events), rest=rest + sum(sizes[MAX_EVENTS:])))
    return SchedulePicture(
        label=label, lanes=tuple(made), unit=unit, held_unit=held_unit, held_source=source
    )


def _bytes_unit(largest: int) -> tuple[str, int]:
    """A unit of which `largest` bytes are at least one, and its bytes."""
    units = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("bytes", 1))
    return next((unit for unit in units if largest >= unit[1]), units[-1])


def _phase(plan: Plan, instruction: Any) -> str:
    if instruction.idle:
        return "idle"
    if instruction.operation == SCORE:
        return "score"
    kind = "prefix" if plan.microbatches[instruction.microbatch].children else "leaf"
    return f"{kind} {instruction.operation}"


def _counted_sizes(plan: Plan) -> list[float]:
    """FLOPs of each instruction, or its tokens without a model's shape.

    An idle instruction runs one token.
    """
    shape = plan.shape
    windows = {0, *(shape.windows if shape else ())}
    sizes = []
    for instruction in plan.program.instructions:
        if instruction.idle:
            work = Work(tokens=1, pairs=dict.fromkeys(windows, 1), num_loss_entries=0)
            places = 1
        else:
            row = plan.microbatches[instruction.microbatch]
            segments = list(row.segments)
            start, length = plan.forest.start[segments], plan.forest.length[segments]
            pairs = {window: visible_pairs(start, length, window) for window in windows}
            num_loss_entries = row.num_loss_entries if instruction.ends_at == HEAD else 0
            work = Work(tokens=row.tokens, pairs=pairs, num_loss_entries=num_loss_entries)
            places = row.padded_tokens
        if shape is None:
            sizes.append(float(places))
            continue
        forward = work.forward_flops(shape)
        is_backward = instruction.operation == BACKWARD
        sizes.append(work.step_flops(shape) - forward if is_backward else forward)
    return sizes


def _held(plan: Plan) -> list[int]:
    """Bytes held during each instruction, as counted, or tokens without a model's shape.

    The cache lasts the whole step. Activations are held from a microbatch's forward to its
    backward. Those of microbatches that are offloaded or computed again are held while these run
    themselves. A score holds no activations, and the one token of an idle instruction is not
    counted.
    """
    shape = plan.shape
    always = 0 if shape is None else cache_bytes(plan, shape)
    open_rows: dict[int, int] = {}
    found = []
    for instruction in plan.program.instructions:
        index, operation = instruction.microbatch, instruction.operation
        if operation == SCORE or index == IDLE:
            found.append(always + sum(open_rows.values()))
            continue
        row = plan.microbatches[index]
        per_token = 1 if shape is None else shape.activation_bytes(row.checkpointing)
        open_rows[index] = row.padded_tokens * per_token
        found.append(always + sum(open_rows.values()))
        # Of a slot that some rank computes again, no rank records the first forward.
        dropped = not instruction.keeps_graph or row.activations != "keep"
        if operation == BACKWARD or (operation == FORWARD and dropped):
            del open_rows[index]
    return found
