"""Groups of a batch as a forest is labelled with them, and as a table. Imports no torch."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from forkpoint.apps.report.figure import Cell, Figure, Table
from forkpoint.apps.report.text import cut
from forkpoint.rollouts.batch import RolloutBatch

MOST_NAME_CHARACTERS = 60
NO_GROUP = "no group"
MOST_GROUPS = 2_000
"""Listed of one batch."""
MOST_RUNS = 4_000
"""Of more runs of lanes none is named in the forest."""


def group_names(batch: RolloutBatch) -> list[str]:
    """The group of each rollout; without a group_id, the number of its prompt in the batch."""
    return [
        f"prompt {number}" if name is None else name
        for name, number in zip(batch.group_ids, batch.group_index.tolist(), strict=True)
    ]


def label_groups(
    order: Sequence[int],
    group_ids: Sequence[str | None],
    nodes: Sequence[dict[str, Any]],
    prompt_tokens: Sequence[int] | None,
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """The groups of a forest, up to MOST_GROUPS, and where each lies in it.

    Args:
        order: rollouts of the forest, from lane 0 on.
        group_ids: of every rollout of the batch.
        nodes: the bands of the forest, each with its lanes, first position and length.
        prompt_tokens: of every rollout of the batch; None where masks are not known.

    Returns:
        Of each group, in order of its first rollout: name, rollouts, the least and the most prompt
        tokens (or None), and the tokens at the beginning that all of its rollouts share. And runs
        of lanes, [first lane, one past the last, group]: a group can lie in several. There are no
        runs where they would be more than MOST_RUNS, or where not all groups are listed.
    """
    lanes: dict[str | None, list[int]] = {group_ids[rollout]: [] for rollout in sorted(order)}
    numbers = {group: number for number, group in enumerate(lanes)}
    runs: list[list[int]] = []
    for lane, rollout in enumerate(order):
        number = numbers[group_ids[rollout]]
        lanes[group_ids[rollout]].append(lane)
        if runs and runs[-1][2] == number:
            runs[-1][1] = lane + 1
        else:
            runs.append([lane, lane + 1, number])
    bands = [node for node in nodes if "segments" not in node]
    begin = np.array([node["begin"] for node in bands], np.int64)
    end = np.array([node["end"] for node in bands], np.int64)
    reach = np.array([node["start"] + node["length"] for node in bands], np.int64)
    groups = []
    for group, of in islice(lanes.items(), MOST_GROUPS):
        through = (begin <= of[0]) & (end > of[-1])
        prompts = None
        if prompt_tokens is not None:
            lengths = [prompt_tokens[order[lane]] for lane in of]
            prompts = [min(lengths), max(lengths)]
        groups.append(
            {
                "name": NO_GROUP if group is None else cut(group, MOST_NAME_CHARACTERS),
                "rollouts": len(of),
                "prompt": prompts,
                # A rollout shares with nobody what it shares with itself.
                "shared": int(reach[through].max(initial=0)) if len(of) > 1 else 0,
            }
        )
    every = len(groups) == len(lanes) and len(runs) <= MOST_RUNS
    return groups, runs if every else []


def groups_figure(forests: Sequence[tuple[str, dict[str, Any]]], left_out: int) -> Figure:
    """The groups of the batches whose forests are drawn; `left_out` more batches are not."""
    found = [(label, group) for label, forest in forests for group in forest["groups"]]
    with_prompts = all(group["prompt"] is not None for _, group in found)
    several = len(forests) > 1
    rows: list[tuple[Cell, ...]] = []
    for label, group in found:
        prompt: tuple[Cell, ...] = ()
        if with_prompts:
            least, most = group["prompt"]
            prompt = (least if least == most else f"{least:,} to {most:,}",)
        batch = (label,) if several else ()
        rows.append((*batch, group["name"], group["rollouts"], *prompt, group["shared"]))
    notes = [
        f"{label}: the first {MOST_GROUPS:,} groups are listed."
        for label, forest in forests
        if sum(group["rollouts"] for group in forest["groups"]) < forest["rollouts"]
    ]
    if left_out:
        notes.append(f"Not listed: groups of {left_out:,} more batches.")
    return Figure(
        name="groups",
        title="Groups",
        caption="A group is the rollouts of one prompt."
        + (" A prompt is the tokens before the first trained one." if with_prompts else "")
        + " What all of a group share is computed once, as far as the plan shares it.",
        kind="table",
        table=Table(
            columns=(
                *(("batch",) if several else ()),
                *("group", "rollouts"),
                *(("prompt (tokens)",) if with_prompts else ()),
                "shared by the whole group (tokens)",
            ),
            rows=rows,
        ),
        notes=tuple(notes),
    )
