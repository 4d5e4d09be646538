"""Leaves that context-parallel ranks split by responses: each rank runs some segments whole.

If a microbatch is split by heads, ranks exchange queries, keys, values and outputs in each layer. A
microbatch that no other microbatch reads holds trees of segments that do not attend to one another.
So ranks can run whole trees, and exchange nothing in attention. They read the prefix cache of
ancestors in all heads, which is gathered once and whose gradients are returned once. This is faster
if many leaves read a cache that is short compared with them.
"""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

import numpy as np

from forkpoint.plan.packing import breadth_or_depth
from forkpoint.plan.plan import Plan
from forkpoint.plan.pricing.cost import ModelShape, segments_work
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest, IntArray


def deal(plan: Plan, entries_S: IntArray, *, pooled: bool = True) -> Plan:
    """Assign the trees of leaves to context-parallel ranks, for leaves with at least as many trees
    as ranks.

    Args:
        plan: a plan with a shape and with all microbatches by heads. Its predictions are not
            updated.
        entries_S: int64 [S], entries that the head computes for each segment.
        pooled: whether leaves below one microbatch may exchange trees, so that the parts of each
            leaf cost about the same.

    Returns `plan` itself if no leaf has enough trees.
    """
    assert plan.shape is not None
    families: dict[int, list[Microbatch]] = {}
    for microbatch in plan.microbatches:
        if not microbatch.children and not microbatch.shared_prompt:
            families.setdefault(microbatch.parent, []).append(microbatch)
    found = list(plan.microbatches)
    for parent, leaves in families.items():
        for family in [leaves] if pooled else [[leaf] for leaf in leaves]:
            for leaf in _dealt(family, plan.forest, plan.shape, entries_S):
                found[leaf.index] = leaf
        above = parent if any(found[leaf.index].parts for leaf in leaves) else -1
        while above >= 0 and not found[above].gathered:
            found[above] = replace(found[above], gathered=True)
            above = found[above].parent
    deals = any(microbatch.parts for microbatch in found)
    return plan.with_microbatches(found) if deals else plan


def _dealt(
    leaves: Sequence[Microbatch], forest: Forest, shape: ModelShape, entries_S: IntArray
) -> list[Microbatch]:
    """The same number of leaves with the same trees, and a part for each rank. [] if there are
    fewer trees than parts.

    Trees are assigned in order of decreasing cost, each to the part with the least cost so far.
    Parts of similar cost form one microbatch, because ranks wait for the costliest part.
    """
    trees: dict[int, list[int]] = {}
    top: dict[int, int] = {}
    for leaf in leaves:
        for segment in leaf.segments:  # parents come before their children
            top[segment] = top.get(int(forest.parent[segment]), segment)
            trees.setdefault(top[segment], []).append(segment)
    count = len(leaves) * shape.context
    if len(trees) < count:
        return []
    costs: dict[int, float] = {}
    for tree, segments in trees.items():
        start, length = forest.start[segments], forest.length[segments]
        work = segments_work(start, length, int(entries_S[segments].sum()), shape.windows)
        costs[tree] = work.step_flops(shape)
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [(0.0, number) for number in range(count)]
    heapify(loads)
    for tree in sorted(trees, key=lambda tree: (-costs[tree], tree)):
        load, number = loads[0]
        parts[number] += trees[tree]
        heapreplace(loads, (load + costs[tree], number))
    order = [number for _, number in sorted(loads, key=lambda load: (-load[0], load[1]))]
    found = []
    for at, leaf in enumerate(leaves):
        numbers = order[at * shape.context :][: shape.context]
        own = [breadth_or_depth(forest, parts[number]) for number in numbers]
        whole = _of(leaf, [s for part in own for s in part], forest, entries_S)
        found.append(replace(whole, parts=tuple(_of(leaf, p, forest, entries_S) for p in own)))
    return found


def _of(leaf: Microbatch, segments: list[int], forest: Forest, entries_S: IntArray) -> Microbatch:
    """The leaf with other segments."""
    ends = np.cumsum([0, *forest.length[segments].tolist()]).tolist()
    return replace(
        leaf,
        segments=tuple(segments),
        segment_begin=tuple(ends[:-1]),
        tokens=ends[-1],
        num_loss_entries=int(entries_S[segments].sum()),
    )
