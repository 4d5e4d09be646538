"""How segments are put into microbatches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import PlanError
from forkpoint.plan.shared_prompts import PlannedPrompt
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest, SortedRollouts, build_forest


@dataclass
class _Draft:
    """A microbatch while it is filled."""

    parent: int
    segments: list[int] = field(default_factory=list)
    width: int = 0
    shared_prompt: Literal["", "sent", "received"] = ""


def round_up(tokens: int, multiple: int) -> int:
    """The least multiple that is no less than `tokens`."""
    return tokens + -tokens % multiple


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of at most `capacity`, as positions in `sizes`, largest first into the first that fits.

    An item larger than the capacity gets a bin of its own.
    """
    bins: list[list[int]] = []
    room = np.zeros(len(sizes) + 1, np.int64)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[item]
        # Of the bins and an empty one, which takes any item.
        room[len(bins)] = max(capacity, size)
        first = int((room[: len(bins) + 1] >= size).argmax())
        if first == len(bins):
            room[first] = capacity
            bins.append([])
        room[first] -= size
        bins[first].append(item)
    return bins


def order_for_microbatches(
    order: SortedRollouts, max_microbatch_tokens: int, multiple: int = 1
) -> list[SortedRollouts]:
    """Rollouts of each microbatch when every microbatch must hold whole paths.

    A tree that fits a microbatch stays whole. A larger one is cut between rollouts, in order, and
    what the cut rollouts share is computed once in each microbatch. `multiple`: of what the lengths
    of microbatches are to be multiples; `max_microbatch_tokens` is one.

    Raises:
        PlanError: a single rollout is longer than a microbatch.
    """
    longest = int(order.edges.max(initial=0))
    if longest > max_microbatch_tokens:
        rollout = int(order.rollouts[order.edges.argmax()])
        raise PlanError(
            f"rollout {rollout} has {longest} tokens to run and a microbatch holds at most "
            f"{max_microbatch_tokens}: a rollout within one microbatch cannot be cut. Raise "
            f"max_microbatch_tokens to {round_up(longest, multiple)}, or use boundary='across', "
            "which cuts it into a chain of microbatches."
        )
    cut = order.cut(_cuts(order, max_microbatch_tokens))
    piece = np.cumsum(cut.shared_edges == 0) - 1
    sizes = np.bincount(piece, weights=cut.new_edges).astype(np.int64).tolist()
    first_entry = np.searchsorted(piece, np.arange(len(sizes) + 1))
    microbatches = []
    for pieces in first_fit_decreasing(sizes, max_microbatch_tokens):
        entries = [np.arange(first_entry[i], first_entry[i + 1]) for i in sorted(pieces)]
        microbatches.append(order.take(np.concatenate(entries)))
    return microbatches


def _cuts(order: SortedRollouts, max_microbatch_tokens: int) -> NDArray[np.bool_]:
    """Where trees that are larger than a microbatch are cut: before each rollout that no longer
    fits."""
    tree = np.cumsum(order.shared_edges == 0) - 1
    sizes = np.bincount(tree, weights=order.new_edges).astype(np.int64)
    where = np.zeros(len(order.edges), bool)
    used = 0
    for entry in np.flatnonzero(sizes[tree] > max_microbatch_tokens).tolist():
        first = entry == 0 or tree[entry] != tree[entry - 1]
        new = int(order.new_edges[entry])
        if first or used + new > max_microbatch_tokens:
            where[entry] = True
            new, used = int(order.edges[entry]), 0
        used += new
    return where


def microbatches_of_whole_paths(
    order: SortedRollouts, rollouts: int, max_microbatch_tokens: int, multiple: int = 1
) -> tuple[Forest, list[Microbatch]]:
    """Microbatches that each hold whole paths: nothing crosses a microbatch (boundary within).

    Here and in the others, lengths of microbatches are padded to multiples of `multiple`, of which
    `max_microbatch_tokens` is one.
    """
    parts = order_for_microbatches(order, max_microbatch_tokens, multiple)
    joined = SortedRollouts(
        *(
            np.concatenate([getattr(p, name) for p in parts] or [np.zeros(0, np.int64)])
            for name in ("rollouts", "edges", "shared_edges")
        )
    )
    forest = build_forest(joined, rollouts)
    microbatch_starts = np.cumsum([0, *(len(p.rollouts) for p in parts)])
    microbatch_of = np.searchsorted(microbatch_starts, forest.owner_begin, side="right") - 1
    drafts = [
        _Draft(-1, np.flatnonzero(microbatch_of == microbatch).tolist())
        for microbatch in range(len(parts))
    ]
    return forest, _finish(forest, drafts, multiple)


def microbatches_across(
    forest: Forest,
    max_microbatch_tokens: int,
    multiple: int = 1,
    *,
    padded: bool,
    max_leaf_tokens: int | None = None,
) -> tuple[Forest, list[Microbatch]]:
    """Microbatches in which every fork lies between a microbatch and its children (boundary
    across).

    Every microbatch takes as many of the segments waiting below the microbatches open around it as
    fit, in order; what lies below the microbatch's own segments waits for its child microbatches.
    With `padded`, segments with nothing below them go into microbatches of their own, batch x
    longest. With `max_leaf_tokens` they do as well, and these hold at most so many tokens, or one
    segment; never more than `max_microbatch_tokens`.
    """
    leaf_tokens = min(max_leaf_tokens or max_microbatch_tokens, max_microbatch_tokens)
    leaf_tokens = max(leaf_tokens - leaf_tokens % multiple, multiple)
    forest = forest.chained(max_microbatch_tokens)
    below, length = forest.children(), forest.length.tolist()
    drafts: list[_Draft] = []
    todo: list[tuple[list[int], int]] = [(np.flatnonzero(forest.parent < 0).tolist(), -1)]
    while todo:
        waiting, parent = todo.pop()
        if padded:
            leaves = [s for s in waiting if not below[s]]
            drafts.extend(_padded(leaves, length, parent, leaf_tokens, multiple))
            waiting = [s for s in waiting if below[s]]
        elif max_leaf_tokens is not None:
            leaves = [s for s in waiting if not below[s]]
            drafts.extend(
                _Draft(parent, microbatch) for microbatch in _in_order(leaves, length, leaf_tokens)
            )
            waiting = [s for s in waiting if below[s]]
        for segments in _in_order(waiting, length, max_microbatch_tokens):
            deeper = [child for segment in segments for child in below[segment]]
            if deeper:
                todo.append((deeper, len(drafts)))
            drafts.append(_Draft(parent, segments))
    return forest, _finish(forest, drafts, multiple)


def microbatches_mixed(
    forest: Forest,
    max_microbatch_tokens: int,
    multiple: int = 1,
    prompts: Sequence[PlannedPrompt] = (),
) -> tuple[Forest, list[Microbatch]]:
    """Microbatches of whole subtrees below microbatches of what is too large for one (boundary
    mixed).

    A segment whose subtree does not fit in a microbatch belongs to the spine. Spines are small
    where trees are bushy, so microbatches of whole subtrees can be filled well while little stays
    open around them. The `prompts`, each the first edges of a tree of its own, are spines as well,
    around everything: those that other ranks send in one microbatch, which does not run, and those
    that this rank sends in as few as they fit in.
    """
    forest = forest.chained(max_microbatch_tokens)
    below, length = forest.children(), forest.length.tolist()
    subtree = forest.subtree_edges().tolist()
    drafts: list[_Draft] = []
    every = [segment for prompt in prompts for segment in prompt.segments(forest)]
    sent = [s for prompt in prompts if not prompt.received for s in prompt.segments(forest)]
    for segments in _in_order(sent, length, max_microbatch_tokens):
        drafts.append(_Draft(len(drafts) - 1, segments, shared_prompt="sent"))
    received = [s for prompt in prompts if prompt.received for s in prompt.segments(forest)]
    if received:
        drafts.append(_Draft(len(drafts) - 1, received, shared_prompt="received"))
    inside = set(every)
    roots = [s for s in np.flatnonzero(forest.parent < 0).tolist() if s not in inside]
    readers = [child for s in every for child in below[s] if child not in inside]
    todo: list[tuple[list[int], int]] = [(roots + readers, len(drafts) - 1)]
    while todo:
        waiting, parent = todo.pop()
        whole = [s for s in waiting if subtree[s] <= max_microbatch_tokens]
        for bin_ in first_fit_decreasing([subtree[s] for s in whole], max_microbatch_tokens):
            drafts.append(_Draft(parent, _with_below([whole[i] for i in bin_], below)))
        spine = [s for s in waiting if subtree[s] > max_microbatch_tokens]
        while spine:
            taken, deeper, later = _spine_microbatch(
                spine, below, subtree, length, max_microbatch_tokens
            )
            todo.append((deeper, len(drafts)))
            drafts.append(_Draft(parent, taken))
            spine = later
    return forest, _finish(forest, drafts, multiple)


def _in_order(segments: list[int], length: list[int], capacity: int) -> list[list[int]]:
    """Neighbours together, as many as fit: what lies below one parent stays back to back."""
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
    """As much of the spine as fits in one microbatch, what then waits below it, and what waits
    beside."""
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


def _with_below(segments: list[int], below: list[list[int]]) -> list[int]:
    found, todo = [], list(segments)
    while todo:
        found.append(todo.pop())
        todo.extend(below[found[-1]])
    return found


def _padded(
    leaves: Iterable[int], length: list[int], parent: int, capacity: int, multiple: int
) -> list[_Draft]:
    """Microbatches of equal places, longest first so that neighbours pad little."""
    drafts: list[_Draft] = []
    for segment in sorted(leaves, key=lambda s: -length[s]):
        draft = drafts[-1] if drafts else None
        if draft is None or (len(draft.segments) + 1) * draft.width > capacity:
            draft = _Draft(parent, width=round_up(length[segment], multiple))
            drafts.append(draft)
        draft.segments.append(segment)
    return drafts


def _finish(forest: Forest, drafts: list[_Draft], multiple: int) -> list[Microbatch]:
    """Number microbatches in visiting order, lay their segments out, and link parents with
    children."""
    below: dict[int, list[int]] = {}
    for draft_index, draft in enumerate(drafts):
        below.setdefault(draft.parent, []).append(draft_index)
    visiting, todo = [], list(reversed(below.get(-1, [])))
    while todo:
        draft_index = todo.pop()
        visiting.append(draft_index)
        todo.extend(reversed(below.get(draft_index, [])))
    number = {draft_index: microbatch for microbatch, draft_index in enumerate(visiting)}
    microbatches = []
    for microbatch, draft_index in enumerate(visiting):
        draft = drafts[draft_index]
        segments = draft.segments if draft.width else breadth_or_depth(forest, draft.segments)
        lengths = [draft.width or int(forest.length[s]) for s in segments]
        begins = np.cumsum([0, *lengths])
        places = int(begins[-1])
        padding = 0 if draft.width else round_up(places, multiple) - places
        microbatches.append(
            Microbatch(
                index=microbatch,
                parent=number.get(draft.parent, -1),
                segments=tuple(segments),
                segment_begin=tuple(begins[:-1].tolist()),
                width=draft.width,
                cache_begin=(-1,) * len(segments),
                state_index=(-1,) * len(segments),
                children=tuple(number[c] for c in below.get(draft_index, [])),
                padded_tokens=places + padding,
                tokens=int(forest.length[segments].sum()),
                padding=padding,
                shared_prompt=draft.shared_prompt,
            )
        )
    return microbatches


def breadth_or_depth(forest: Forest, segments: list[int]) -> list[int]:
    """The order of a microbatch's segments that needs the fewer attention launches.

    Depth first, a first child follows its parent, all queries below its brothers are one rectangle,
    and each segment that forks in the microbatch costs a launch. Breadth first, the rectangles of
    neighbouring trees lie back to back and go into one launch: several groups in a microbatch cost
        as many launches as one.
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
