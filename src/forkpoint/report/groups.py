"""Groups of a batch as a forest is labelled with them, and as a table. Imports no torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from forkpoint.report.figure import Cell, Figure, Table
from forkpoint.report.text import cut
from forkpoint.rollouts import RolloutBatch

MOST_NAME_CHARACTERS = 60
NO_GROUP = "no group"


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
    """The groups of a forest, and where each lies in it.

    Args:
        order: rollouts of the forest, from lane 0 on.
        group_ids: of every rollout of the batch.
        nodes: the bands of the forest, each with its lanes, first position and length.
        prompt_tokens: of every rollout of the batch; None where masks are not known.

    Returns:
        Of each group, in order of first lane: name, rollouts, the least and the most prompt tokens
        (or None), and the tokens at the beginning that all of its rollouts share. And runs of
        lanes, [first lane, one past the last, group]: a group can lie in several.
    """
    lanes: dict[str | None, list[int]] = {}
    runs: list[list[int]] = []
    numbers: dict[str | None, int] = {}
    for lane, rollout in enumerate(order):
        group = group_ids[rollout]
        number = numbers.setdefault(group, len(numbers))
        lanes.setdefault(group, []).append(lane)
        if runs and runs[-1][2] == number:
            runs[-1][1] = lane + 1
        else:
            runs.append([lane, lane + 1, number])
    bands = [node for node in nodes if "segments" not in node]
    begin = np.array([node["begin"] for node in bands], np.int64)
    end = np.array([node["end"] for node in bands], np.int64)
    reach = np.array([node["start"] + node["length"] for node in bands], np.int64)
    groups = []
    for group, of in lanes.items():
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
    return groups, runs


def groups_figure(forests: Sequence[tuple[str, dict[str, Any]]], left_out: int) -> Figure:
    """The groups of the batches whose forests are drawn; `left_out` more batches are not."""
    found = [(label, group) for label, forest in forests for group in forest["groups"]]
    with_prompts = all(group["prompt"] is not None for _, group in found)
    rows: list[tuple[Cell, ...]] = []
    for label, group in found:
        prompt: tuple[Cell, ...] = ()
        if with_prompts:
            least, most = group["prompt"]
            prompt = (least if least == most else f"{least:,} to {most:,}",)
        rows.append((label, group["name"], group["rollouts"], *prompt, group["shared"]))
    return Figure(
        name="groups",
        title="Groups",
        caption="A group is the rollouts of one prompt."
        + (" A prompt is the tokens before the first trained one." if with_prompts else "")
        + " What all of a group share is computed once, as far as the plan shares it.",
        kind="table",
        table=Table(
            columns=(
                *("batch", "group", "rollouts"),
                *(("prompt (tokens)",) if with_prompts else ()),
                "shared by the whole group (tokens)",
            ),
            rows=rows,
        ),
        notes=(f"Not listed: groups of {left_out:,} more batches.",) if left_out else (),
    )
