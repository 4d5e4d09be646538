"""Forest of a batch, cut down to a size that can be drawn. Imports no torch.

The largest subtrees by tokens as given are kept; a subtree never has more of them than what it
hangs on, so what is kept is a forest. Neighbouring subtrees that are left out become one end that
says how many segments and tokens are in it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from forkpoint.apps.report.figure import Choice, Figure, Table
from forkpoint.apps.report.groups import label_groups
from forkpoint.apps.report.text import cut
from forkpoint.plan import Plan
from forkpoint.tree.forest import Forest

MOST_SEGMENTS = 900
"""Drawn at most in one forest."""
MOST_NAMES = 4_000
"""Rollouts whose ids are written down; of more, positions are shown."""
MOST_NAME_CHARACTERS = 120


class _Merged:
    """A plan's forest without the cuts that only fit it into rows."""

    def __init__(self, plan: Plan) -> None:
        forest: Forest = plan.forest
        row_of = {segment: row.index for row in plan.microbatches for segment in row.segments}
        multiplicity = forest.multiplicity
        at = np.full(len(forest), -1, np.int64)
        self.parent: list[int] = []
        self.first: list[int] = []
        self.length: list[int] = []
        self.rows: list[list[int]] = []
        for segment, parent in enumerate(forest.parent.tolist()):
            if parent >= 0 and multiplicity[parent] == multiplicity[segment]:
                at[segment] = at[parent]
                self.length[at[segment]] += int(forest.length[segment])
                rows = self.rows[at[segment]]
                if row_of[segment] not in rows:
                    rows.append(row_of[segment])
                continue
            at[segment] = len(self.first)
            self.parent.append(int(at[parent]) if parent >= 0 else -1)
            self.first.append(segment)
            self.length.append(int(forest.length[segment]))
            self.rows.append([row_of[segment]])
        first = np.asarray(self.first, np.int64)
        self.begin, self.end = forest.owner_begin[first], forest.owner_end[first]
        self.start = forest.start[first]
        given = (self.end - self.begin) * np.asarray(self.length, np.int64)
        self.below_segments = np.ones(len(first), np.int64)
        self.below_tokens = np.asarray(self.length, np.int64).copy()
        self.below_given = given.copy()
        for node in range(len(first) - 1, -1, -1):
            parent = self.parent[node]
            if parent >= 0:
                self.below_segments[parent] += self.below_segments[node]
                self.below_tokens[parent] += self.below_tokens[node]
                self.below_given[parent] += self.below_given[node]

    def __len__(self) -> int:
        return len(self.first)


def draw_forest(
    plan: Plan,
    rollout_ids: Sequence[str],
    group_ids: Sequence[str | None],
    prompt_tokens: Sequence[int] | None = None,
) -> dict[str, Any]:
    """A forest as the page draws it; lists have one entry a node, parents before children.

    Args:
        plan: of a batch.
        rollout_ids: of its rollouts.
        group_ids: of its rollouts.
        prompt_tokens: of its rollouts, the tokens before the first trained one; None where masks
            are not known.
    """
    merged = _Merged(plan)
    keep = np.zeros(len(merged), bool)
    keep[np.argsort(-merged.below_given, kind="stable")[:MOST_SEGMENTS]] = True
    names = plan.microbatch_names
    nodes: list[dict[str, Any]] = []
    place: dict[int, int] = {-1: -1}
    for node in np.flatnonzero(keep).tolist():
        place[node] = len(nodes)
        nodes.append(
            {
                "parent": place[merged.parent[node]],
                "start": int(merged.start[node]),
                "length": merged.length[node],
                "begin": int(merged.begin[node]),
                "end": int(merged.end[node]),
                "microbatches": ", ".join(names[row] for row in merged.rows[node][:4])
                + (f" and {len(merged.rows[node]) - 4} more" if len(merged.rows[node]) > 4 else ""),
            }
        )
    nodes += _left_out(merged, keep, place)
    order: list[int] = plan.forest.order.tolist()
    named = len(order) <= MOST_NAMES
    groups, runs = label_groups(order, group_ids, nodes, prompt_tokens)
    return {
        "nodes": nodes,
        "groups": groups,
        "runs": runs,
        "names": [cut(rollout_ids[i], MOST_NAME_CHARACTERS) for i in order] if named else None,
        "rollouts": len(order),
        "segments": len(merged),
        "drawn": int(keep.sum()),
        "tokens": {
            "given": plan.logical_tokens,
            "unique": plan.unique_tokens,
            "run": plan.computed_tokens,
        },
        "sharing": plan.sharing,
        "boundary": plan.boundary,
    }


def _left_out(merged: _Merged, keep: np.ndarray, place: dict[int, int]) -> list[dict[str, Any]]:
    """An end for each run of neighbouring subtrees that are not drawn."""
    ends: dict[tuple[int, int], dict[str, Any]] = {}
    for node in np.flatnonzero(~keep).tolist():
        parent = merged.parent[node]
        if parent >= 0 and not keep[parent]:
            continue
        begin, end = int(merged.begin[node]), int(merged.end[node])
        found = ends.pop((parent, begin), None)
        if found is None:
            found = {
                "parent": place[parent],
                "start": int(merged.start[node]),
                "length": 0,
                "begin": begin,
                "segments": 0,
                "tokens": 0,
            }
        found["end"] = end
        found["length"] = max(found["length"], int(merged.length[node]))
        found["segments"] += int(merged.below_segments[node])
        found["tokens"] += int(merged.below_tokens[node])
        ends[parent, end] = found
    return list(ends.values())


def forest_figure(forests: Sequence[tuple[str, dict[str, Any]]], left_out: int) -> Figure:
    """Forests to choose from, by label; `left_out` more batches are not drawn."""
    rows = []
    for label, forest in forests:
        for node in forest["nodes"]:
            if "segments" in node:
                continue
            rows.append(
                (
                    *(label, node["start"], node["length"], node["end"] - node["begin"]),
                    node["microbatches"],
                )
            )
    notes = []
    for label, forest in forests:
        if forest["drawn"] < forest["segments"]:
            notes.append(
                f"{label}: {forest['drawn']:,} of {forest['segments']:,} segments are drawn, those "
                "with the most tokens below them; hatched ends stand for the rest."
            )
    if left_out:
        notes.append(f"Not drawn: {left_out:,} more of the batches.")
    return Figure(
        name="forest",
        title="What was shared",
        caption="Each band is a run of tokens that the same rollouts share: its length is what is "
        "computed, its width how many rollouts go through it, so to scale its area is what "
        "dense training would compute. Where a band divides, rollouts part.",
        kind="forest",
        table=Table(
            columns=("batch", "first position (tokens)", "tokens", "rollouts", "microbatches"),
            rows=rows,
        ),
        choices=tuple(Choice(label=label, data=forest) for label, forest in forests),
        notes=tuple(notes),
    )
