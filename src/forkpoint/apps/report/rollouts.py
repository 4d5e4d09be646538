"""A chapter on the savings of sharing on a file of rollouts or a trace. Imports no torch."""

from collections.abc import Iterable, Sequence

import numpy as np

from forkpoint.apps.report.draw import Draw, forest
from forkpoint.apps.report.page import Cell, Chapter, Figure
from forkpoint.apps.report.text import abbreviate
from forkpoint.apps.report.verdict import Tile, memory_tiles, predicted_speed_tile, tokens_tile
from forkpoint.plan import Plan, Totals
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.groups import prompt_lengths
from forkpoint.units import exactly

MAX_BATCHES = 4
"""That are drawn; a report says how many others there are."""
MAX_SEGMENTS = 5_000
"""That are drawn of one forest."""
MAX_NAMED_GROUPS = 12
"""That a forest has room to name."""
MAX_NAME_CHARACTERS = 60


def rollouts_chapter(
    name: str,
    batches: Iterable[tuple[RolloutBatch, Plan]],
    *,
    recorded: bool = False,
) -> Chapter:
    """A chapter on the savings of sharing, from a plan of each batch.

    Batches are read one at a time, and the first MAX_BATCHES are drawn.

    Args:
        name: the file's.
        batches: rollouts, and their plan.
        recorded: whether they are those of a trace, and not one file taken as one batch.
    """
    totals, name = Totals(), abbreviate(name, MAX_NAME_CHARACTERS)
    pictures: list[Draw] = []
    rows: list[tuple[Cell, ...]] = []
    notes: list[str] = []
    groups = trained = 0
    budget, reason = None, ""
    for number, (batch, plan) in enumerate(batches):
        totals.add(plan)
        groups += len(batch.groups())
        trained += batch.trained_tokens
        budget, reason = plan.memory_budget_bytes, plan.reason
        if number < MAX_BATCHES:
            label = f"batch {number}" if recorded else name
            pictures.append(forest_picture(label, batch, plan))
            rows += group_rows(label, batch, plan)
            if len(plan.forest) > MAX_SEGMENTS:
                notes.append(f"Of {label} the {MAX_SEGMENTS:,} largest segments are drawn.")
    if totals.batches > MAX_BATCHES:
        notes.append(f"Not drawn: {totals.batches - MAX_BATCHES:,} more of the batches.")
    memory = memory_tiles(totals.predicted_peak_bytes, budget=budget)
    what = "rollouts, taken as one batch"
    if recorded:
        what = f"{totals.batches:,} recorded batches, each by itself"
    rollouts = f"{totals.rollouts:,} rollouts"
    of_groups = f"in {groups:,} group{'' if groups == 1 else 's'}"
    remark = f"{trained:,} trained tokens of {totals.logical_tokens:,} given."
    return Chapter(
        title=name,
        subtitle=f"Savings of sharing on these {what}. Nothing was run.",
        tiles=[
            predicted_speed_tile(totals),
            tokens_tile(totals.computed_tokens, totals.logical_tokens, totals.left_out.tokens),
            *memory,
            Tile(value=rollouts, label=of_groups, remark=remark),
        ],
        figures=[
            Figure(
                name="forest",
                title="Shared tokens",
                caption="Each band is a segment, a run of tokens that the same rollouts share. Its "
                "length is the tokens computed, its width the rollouts through it, and its area "
                "what dense training computes. A segment also ends where its microbatch does.",
                pictures=pictures,
                notes=notes,
            ),
            Figure(
                name="groups",
                title="Groups",
                caption="A group is the rollouts of one prompt. A prompt is the tokens before the "
                "first trained one.",
                columns=("batch", "group", "rollouts", "prompt (tokens)", "shared by all (tokens)"),
                rows=rows,
                notes=notes[-1:],
            ),
            counts_figure(totals, groups, trained, reason),
        ],
    )


def group_names(batch: RolloutBatch) -> list[str]:
    """The group of each rollout; without a group_id, the number of its prompt in the batch."""
    pairs = zip(batch.group_ids, batch.group_index.tolist(), strict=True)
    return [f"prompt {number}" if name is None else name for name, number in pairs]


def _members(batch: RolloutBatch, plan: Plan) -> dict[str, dict[int, int]]:
    """The lanes of each group's rollouts. A rollout of one token has none."""
    lanes = {rollout: lane for lane, rollout in enumerate(plan.forest.order.tolist())}
    found: dict[str, dict[int, int]] = {}
    for rollout, name in enumerate(group_names(batch)):
        if rollout in lanes:
            found.setdefault(name, {})[rollout] = lanes[rollout]
    return found


def forest_picture(label: str, batch: RolloutBatch, plan: Plan) -> Draw:
    """The segments with the most tokens times rollouts, and the groups beside their lanes."""
    segments, members = drawn_segments(plan), _members(batch, plan)
    names = {float(np.mean(list(of.values()))) + 0.5: name for name, of in members.items()}
    start, length, lanes = segments
    return forest(label, start, length, lanes, names if len(names) <= MAX_NAMED_GROUPS else {})


def drawn_segments(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First positions [S], tokens [S] and lanes [S, 2] of the segments that are drawn."""
    of = plan.forest
    area = of.length * (of.owner_end - of.owner_begin)
    kept = np.sort(np.argsort(-area, kind="stable")[:MAX_SEGMENTS])
    lanes = np.stack([of.owner_begin[kept], of.owner_end[kept]], axis=1)
    return of.start[kept], of.length[kept], lanes


def group_rows(label: str, batch: RolloutBatch, plan: Plan) -> Sequence[tuple[Cell, ...]]:
    """The rows of a batch in the table of groups."""
    of = plan.forest
    prompts = prompt_lengths(batch.loss_mask, batch.offsets)
    rows: list[tuple[Cell, ...]] = []
    for name, members in _members(batch, plan).items():
        lengths = sorted({int(prompts[rollout]) for rollout in members})
        prompt: Cell = lengths[0]
        if len(lengths) > 1:
            prompt = f"{lengths[0]:,} to {lengths[-1]:,}"
        lanes = list(members.values())
        through = (of.owner_begin <= min(lanes)) & (of.owner_end > max(lanes))
        # A single rollout shares no tokens.
        shared = int((of.start + of.length)[through].max(initial=0)) if len(lanes) > 1 else 0
        rows.append((label, abbreviate(name, MAX_NAME_CHARACTERS), len(lanes), prompt, shared))
    return rows


def counts_figure(totals: Totals, groups: int, trained: int, reason: str) -> Figure:
    """Sums over the plans of all batches."""
    rows: list[tuple[str, Cell]] = [
        ("batches", totals.batches),
        ("rollouts", totals.rollouts),
        ("groups", groups),
        ("tokens as given (logical)", totals.logical_tokens),
        ("tokens once in a batch (unique)", totals.unique_tokens),
        ("tokens without gradient, not run", totals.left_out.tokens),
        ("tokens run (edges)", totals.computed_tokens),
        ("trained tokens", trained),
        ("microbatches", totals.microbatches),
    ]
    for kind, count in totals.kinds.most_common():
        several = totals.batches > 1
        rows.append((f"batches planned as {kind}", count) if several else ("plan", reason))
    unit = "tokens" if totals.shape is None else "FLOPs"
    rows.append((f"bound on the speed-up ({unit})", f"{totals.bound:.2f}x"))
    if totals.predicted_peak_bytes is not None:
        peak = exactly(totals.predicted_peak_bytes)
        rows.append(("predicted peak of activations and prefix cache, of any batch", peak))
    return Figure(name="counts", title="Counts", columns=("name", "value"), rows=rows)
