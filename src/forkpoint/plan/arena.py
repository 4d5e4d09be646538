"""Where boundary state lies while rows that read it are running.

Rows nest: a row's children run between its forward and its backward. So the arena is a stack: a row
takes the slots above those of the rows open around it and gives them back when it is done. A path
through rows of one segment each (a chain, a prefix and its suffixes) thereby lies in one slice.
"""

from dataclasses import replace

from forkpoint.forest import Forest
from forkpoint.plan.layout import Row


def place_boundaries(forest: Forest, rows: list[Row]) -> tuple[list[Row], int]:
    """Give arena slots to every segment that another row reads.

    Args:
        forest: the plan's forest.
        rows: in visiting order, every row after its parent.

    Returns:
        The rows with `arena_begin` set, and how many slots the arena needs.
    """
    row_of = {segment: row.index for row in rows for segment in row.segments}
    read_elsewhere = {
        int(parent)
        for segment, parent in enumerate(forest.parent.tolist())
        if parent >= 0 and row_of[parent] != row_of[segment]
    }
    # A segment above one that is read elsewhere is read by the same rows, unless it lies in theirs.
    for segment in sorted(read_elsewhere, reverse=True):
        parent = int(forest.parent[segment])
        while parent >= 0 and parent not in read_elsewhere:
            read_elsewhere.add(parent)
            parent = int(forest.parent[parent])

    placed: list[Row] = []
    tops: dict[int, int] = {-1: 0}
    slots = 0
    for row in rows:
        top = tops[row.parent]
        begins = []
        for segment in row.segments:
            keeps = segment in read_elsewhere
            begins.append(top if keeps else -1)
            top += int(forest.length[segment]) if keeps else 0
        tops[row.index] = top
        slots = max(slots, top)
        placed.append(replace(row, arena_begin=tuple(begins)))
    return placed, slots
