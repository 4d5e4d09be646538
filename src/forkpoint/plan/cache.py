"""Where prefix cache lies while microbatches that read it are running.

Microbatches nest: a microbatch's children run between its forward and its backward. So the cache is
    a stack: a microbatch takes the places above those of the microbatches open around it and gives
    them back when it is done. A path through microbatches of one segment each (a chain, a prefix
    and its suffixes) thereby lies in one slice.

Layers that attend keep something for every token of a segment, and all microbatches below read it.
Layers that carry a state keep one for the segment's end, which only its own children start from.
"""

from dataclasses import replace

from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest


def place_boundaries(
    forest: Forest, microbatches: list[Microbatch]
) -> tuple[list[Microbatch], int, int]:
    """Give cache places to every segment that another microbatch reads.

    Args:
        forest: the plan's forest.
        microbatches: in visiting order, every microbatch after its parent.

    Returns:
        The microbatches with `cache_begin` and `state_index` set, and how many places the cache
        needs for tokens and for states.
    """
    microbatch_of = {
        segment: microbatch.index for microbatch in microbatches for segment in microbatch.segments
    }
    forks = {
        int(parent)
        for segment, parent in enumerate(forest.parent.tolist())
        if parent >= 0 and microbatch_of[parent] != microbatch_of[segment]
    }
    read_elsewhere = set(forks)
    # A segment above one that is read elsewhere is read by the same microbatches, unless it lies in
    # theirs.
    for segment in sorted(read_elsewhere, reverse=True):
        parent = int(forest.parent[segment])
        while parent >= 0 and parent not in read_elsewhere:
            read_elsewhere.add(parent)
            parent = int(forest.parent[parent])

    placed: list[Microbatch] = []
    tops: dict[int, int] = {-1: 0}
    state_tops: dict[int, int] = {-1: 0}
    places = cache_states = 0
    for microbatch in microbatches:
        top, state_top = tops[microbatch.parent], state_tops[microbatch.parent]
        begins, states = [], []
        for segment in microbatch.segments:
            keeps = segment in read_elsewhere
            begins.append(top if keeps else -1)
            top += int(forest.length[segment]) if keeps else 0
            states.append(state_top if segment in forks else -1)
            state_top += segment in forks
        tops[microbatch.index], state_tops[microbatch.index] = top, state_top
        places, cache_states = max(places, top), max(cache_states, state_top)
        placed.append(replace(microbatch, cache_begin=tuple(begins), state_index=tuple(states)))
    return placed, places, cache_states
