"""Packing of segments into microbatches."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import PlanError
from forkpoint.plan.shared_prompts import PlannedPrompt
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest, SortedRollouts, build_forest


class _Draft(NamedTuple):
    """A microbatch without a number."""

    parent: int
    segments: list[int]
    shared_prompt: Literal["", "sent", "received"] = ""


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing bin packing: bins of at most `capacity`, as positions in `sizes`.

    An item larger than the capacity gets a bin of its own.
    """
    bins: list[list[int]] = []
    room = np.zeros(len(sizes) + 1, np.int64)
    first, before = 0, -1
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[item]
        if size != before:
            first, before = 0, size
        # The last bin is empty, and takes any item. Items of one size fit no bin before the last
        # that took one of them.
        room[len(bins)] = max(capacity, size)
        if room[first] < size:
            first += int((room[first : len(bins) + 1] >= size).argmax())
        if first == len(bins):
            room[first] = capacity
            bins.append([])
        room[first] -= size
        bins[first].append(item)
    return bins


def microbatches_of_whole_paths(
    order: SortedRollouts, rollouts: int, max_microbatch_tokens: int
) -> tuple[Forest, list[Microbatch]]:
    """Pack whole paths, so that no microbatch reads another one (boundary within).

    A tree that fits in a microbatch stays whole. A larger tree is cut between rollouts, in order.
    Tokens that rollouts of several microbatches share are computed once in each.

    Raises:
        PlanError: a single rollout is longer than a microbatch.
    """
    longest = int(order.edges.max(initial=0))
    if longest > max_microbatch_tokens:
        rollout = int(order.rollouts[order.edges.argmax()])
        raise PlanError(
            f"rollout {rollout} has {longest} tokens to run and a microbatch holds at most "
            f"{max_microbatch_tokens}: boundary='within' cannot cut a rollout. Raise "
            f"max_microbatch_tokens to {longest}, or use boundary='across'."
        )
    cut = order.cut(_cuts(order, max_microbatch_tokens))
    piece = np.cumsum(cut.shared_edges == 0) - 1
    sizes = np.bincount(piece, weights=cut.new_edges).astype(np.int64).tolist()
    first_entry = np.searchsorted(piece, np.arange(len(sizes) + 1))
    bins = first_fit_decreasing(sizes, max_microbatch_tokens)
    inside = [piece for pieces in bins for piece in sorted(pieces)]
    counts = np.diff(first_entry)[inside]
    before = np.cumsum(counts) - counts
    entries = np.arange(len(order.edges)) + np.repeat(first_entry[inside] - before, counts)
    ends = np.cumsum(counts)[np.cumsum([len(pieces) for pieces in bins], dtype=np.int64) - 1]
    joined = order.take(entries)
    joined = joined.cut(np.isin(np.arange(len(joined.edges)), ends))
    forest = build_forest(joined, rollouts)
    # Segments are in the order of the rollouts, so those of a microbatch are neighbours.
    microbatch_of = np.searchsorted(ends, forest.owner_begin, side="right")
    begins = np.searchsorted(microbatch_of, np.arange(len(bins) + 1)).tolist()
    drafts = [_Draft(-1, list(range(begin, end))) for begin, end in pairwise(begins)]
    return forest, _finish(forest, drafts)


def _cuts(order: SortedRollouts, max_microbatch_tokens: int) -> NDArray[np.bool_]:
    """Positions at which trees larger than a microbatch are cut: before each rollout that no longer
    fits."""
    tree, new_edges = np.cumsum(order.shared_edges == 0) - 1, order.new_edges
    sizes = np.bincount(tree, weights=new_edges).astype(np.int64)
    where = np.zeros(len(order.edges), bool)
    used = 0
    for entry in np.flatnonzero(sizes[tree] > max_microbatch_tokens).tolist():
        first = entry == 0 or tree[entry] != tree[entry - 1]
        new = int(new_edges[entry])
        if first or used + new > max_microbatch_tokens:
            where[entry] = True
            new, used = int(order.edges[entry]), 0
        used += new
    return where


def microbatches_across(
    forest: Forest, max_microbatch_tokens: int
) -> tuple[Forest, list[Microbatch]]:
    """Pack segments so that every fork lies between a microbatch and its children (boundary
    across).

    A microbatch takes, in order, as many of the waiting segments as fit. Children of its segments
    then wait for its child microbatches.
    """
    forest = forest.chained(max_microbatch_tokens)
    below, length = forest.children(), forest.length.tolist()
    drafts: list[_Draft] = []
    todo: list[tuple[list[int], int]] = [(np.flatnonzero(forest.parent < 0).tolist(), -1)]
    while todo:
        waiting, parent = todo.pop()
        for segments in _in_order(waiting, length, max_microbatch_tokens):
            deeper = [child for segment in segments for child in below[segment]]
            if deeper:
                todo.append((deeper, len(drafts)))
            drafts.append(_Draft(parent, segments))
    return forest, _finish(forest, drafts)


def microbatches_mixed(
    forest: Forest,
    max_microbatch_tokens: int,
    prompts: Sequence[PlannedPrompt] = (),
) -> tuple[Forest, list[Microbatch]]:
    """Pack whole subtrees, below microbatches of segments whose subtrees are too large (boundary
    mixed).

    A segment whose subtree does not fit in a microbatch belongs to the spine. If a tree has many
    branches, its spine is small, so microbatches of whole subtrees can be filled while few
    ancestors are open. Each of the `prompts` is the first edges of a tree, and belongs to the spine
    around everything. Prompts that other ranks send are in one microbatch, which does not run.
    Prompts that this rank sends are in as few microbatches as possible.
    """
    forest = forest.chained(max_microbatch_tokens)
    below, length = forest.children(), forest.length.tolist()
    subtree = forest.subtree_edges().tolist()
    drafts: list[_Draft] = []
    segments_of = [prompt.segments(forest) for prompt in prompts]
    every = [s for segments in segments_of for s in segments]
    received = [
        s for p, segments in zip(prompts, segments_of, strict=True) if p.received for s in segments
    ]
    inside = set(every)
    sent = [s for s in every if s not in set(received)]
    for segments in _in_order(sent, length, max_microbatch_tokens):
        drafts.append(_Draft(len(drafts) - 1, segments, "sent"))
    if received:
        drafts.append(_Draft(len(drafts) - 1, received, "received"))
    roots = [s for s in np.flatnonzero(forest.parent < 0).tolist() if s not in inside]
    readers = [child for s in every for child in below[s] if child not in inside]
    todo: list[tuple[list[int], int]] = [(roots + readers, len(drafts) - 1)]
    while todo:
        waiting, parent = todo.pop()
        whole = [s for s in waiting if subtree[s] <= max_microbatch_tokens]
        for bin_ in first_fit_decreasing([subtree[s] for s in whole], max_microbatch_tokens):
            segments, tops = [], [whole[i] for i in bin_]
            while tops:
                segments.append(tops.pop())
                tops += below[segments[-1]]
            drafts.append(_Draft(parent, segments))
        spine = [s for s in waiting if subtree[s] > max_microbatch_tokens]
        while spine:
            taken, deeper, later = _spine_microbatch(
                spine, below, subtree, length, max_microbatch_tokens
            )
            todo.append((deeper, len(drafts)))
            drafts.append(_Draft(parent, taken))
            spine = later
    return forest, _finish(forest, drafts)


def _in_order(segments: list[int], length: list[int], capacity: int) -> list[list[int]]:
    """Bins of consecutive items, so that children of one parent stay together."""
    microbatches: list[list[int]] = []
    used = 0
    for segment in segments:
        if not microbatches or used + length[segment] > capacity:
            microbatches.append([])
            used = 0
        microbatches[-1].append(segment)
        used += length[segment]
    return microbatches


def _spine_microbatch(
    spine: list[int], below: list[list[int]], subtree: list[int], length: list[int], capacity: int
) -> tuple[list[int], list[int], list[int]]:
    """One microbatch of the spine, the segments that then wait below it, and those that wait beside
    it."""
    taken: list[int] = []
    deeper: list[int] = []
    used = 0
    for position, top in enumerate(spine):
        if used + length[top] > capacity:
            return taken, deeper, spine[position:]
        todo = [top]
        while todo:
            segment = todo.pop()
            if subtree[segment] > capacity and used + length[segment] <= capacity:
                taken.append(segment)
                used += length[segment]
                todo.extend(reversed(below[segment]))
            else:
                deeper.append(segment)
    return taken, deeper, []


def _finish(forest: Forest, drafts: list[_Draft]) -> list[Microbatch]:
    """Number microbatches in visiting order, order their segments, and set parents and children."""
    below: dict[int, list[int]] = {}
    for at, draft in enumerate(drafts):
        below.setdefault(draft.parent, []).append(at)
    visiting, todo = [], list(reversed(below.get(-1, [])))
    while todo:
        visiting.append(todo.pop())
        todo.extend(reversed(below.get(visiting[-1], [])))
    number = {at: index for index, at in enumerate(visiting)}
    microbatches = []
    for index, at in enumerate(visiting):
        segments = breadth_or_depth(forest, drafts[at].segments)
        begins = np.cumsum([0, *forest.length[segments].tolist()]).tolist()
        microbatches.append(
            Microbatch(
                index=index,
                parent=number.get(drafts[at].parent, -1),
                segments=tuple(segments),
                segment_begin=tuple(begins[:-1]),
                children=tuple(number[child] for child in below.get(at, [])),
                tokens=begins[-1],
                shared_prompt=drafts[at].shared_prompt,
            )
        )
    return microbatches


def breadth_or_depth(forest: Forest, segments: list[int]) -> list[int]:
    """Order a microbatch's segments depth first or breadth first, whichever needs fewer attention
    launches.

    Depth first, a first child follows its parent, all queries below its siblings form one
    rectangle, and each segment that forks in the microbatch needs a launch. Breadth first, the
    rectangles of neighbouring trees are contiguous and form one launch, so several groups in a
    microbatch need as many launches as one group.
    """
    inside = set(segments)
    level: dict[int, int] = {}
    children: dict[int, int] = {}
    for segment in sorted(segments):
        parent = int(forest.parent[segment])
        level[segment] = level[parent] + 1 if parent in inside else 0
        children[parent] = children.get(parent, 0) + 1
    depth_first = sorted(segments)
    breadth_first = sorted(segments, key=lambda s: (level[s], s))
    if breadth_first == depth_first:
        return depth_first
    forks = sum(children[segment] > 1 for segment in children.keys() & inside)
    levels = max(level.values()) + 1
    return breadth_first if levels * (levels - 1) // 2 < forks else depth_first
