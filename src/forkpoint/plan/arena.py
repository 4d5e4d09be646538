"""Where boundary state lies while rows that read it are running.

Rows nest: a row's children run between its forward and its backward. So the arena is a stack: a row
takes the slots above those of the rows open around it and gives them back when it is done. A path
through rows of one segment each (a chain, a prefix and its suffixes) thereby lies in one slice.

Layers that attend keep something for every token of a segment, and all rows below read it. Layers
that carry a state keep one for the segment's end, which only its own children start from.
"""

from dataclasses import replace

from forkpoint.forest import Forest
from forkpoint.plan.layout import Row


def place_boundaries(forest: Forest, rows: list[Row]) -> tuple[list[Row], int, int]:
    """Give arena slots to every segment that another row reads.

    Args:
        forest: the plan's forest.
        rows: in visiting order, every row after its parent.

    Returns:
        The rows with `arena_begin` and `state_slot` set, and how many slots the arena needs for
        tokens and for states.
    """
    row_of = {segment: row.index for row in rows for segment in row.segments}
    forks = {
        int(parent)
        for segment, parent in enumerate(forest.parent.tolist())
        if parent >= 0 and row_of[parent] != row_of[segment]
    }
    read_elsewhere = set(forks)
    # A segment above one that is read elsewhere is read by the same rows, unless it lies in theirs.
    for segment in sorted(read_elsewhere, reverse=True):
        parent = int(forest.parent[segment])
        while parent >= 0 and parent not in read_elsewhere:
            read_elsewhere.add(parent)
            parent = int(forest.parent[parent])

    placed: list[Row] = []
    tops: dict[int, int] = {-1: 0}
    state_tops: dict[int, int] = {-1: 0}
    slots = state_slots = 0
    for row in rows:
        top, state_top = tops[row.parent], state_tops[row.parent]
        begins, states = [], []
        for segment in row.segments:
            keeps = segment in read_elsewhere
            begins.append(top if keeps else -1)
            top += int(forest.length[segment]) if keeps else 0
            states.append(state_top if segment in forks else -1)
            state_top += segment in forks
        tops[row.index], state_tops[row.index] = top, state_top
        slots, state_slots = max(slots, top), max(state_slots, state_top)
        placed.append(replace(row, arena_begin=tuple(begins), state_slot=tuple(states)))
    return placed, slots, state_slots
