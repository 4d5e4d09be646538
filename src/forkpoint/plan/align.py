"""Alignment of the programs of ranks, so that all ranks issue the same collectives in the same
order.

A program runs microbatches forward and backward, properly nested: the microbatches that read the
prefix cache of another one run between its forward and its backward. Ranks of one job issue
collectives in every forward and every backward, so all must run the same operations in the same
order, although their microbatches differ. `align` gives them a common forest of *slots*. A
rank runs at most one microbatch in a slot. A rank without a microbatch in a slot idles the slot: it
runs one token forward, and a gradient of zero backward.

Slots keep the order and the nesting of each rank's microbatches: a microbatch is inside another one
if and only if its slot is inside the other's slot. There may be further slots in between, which the
rank idles, and slots around a microbatch that has no parent.
"""

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import PlanError
from forkpoint.plan.program import (
    BACKWARD,
    BLOCKS,
    BOUNDARY,
    ENDS,
    FORWARD,
    IDLE,
    SCORE,
    Instruction,
    Program,
    nested_instructions,
)
from forkpoint.plan.shared_prompts import around_and_inside, split_at_exchanges

NO_PARENT = -1
SLOT_COST = 0.1
"""Cost of the collectives of a slot, relative to the cost of the costliest microbatch."""
AGAIN = 4 / 3
"""Ratio of the cost of a microbatch that runs forward twice to that of one that runs forward
once."""
Shape = tuple[int, ...]
"""For each microbatch in order of forwards, the position of the microbatch around it, or
NO_PARENT."""
Floats = NDArray[np.float64]


class Node(NamedTuple):
    """One microbatch of a program."""

    parent: int
    """Position, in the order of forwards, of the microbatch around it; or NO_PARENT."""
    microbatch: int
    """Its index in the rank's plan, or IDLE."""
    recomputed: bool
    """Whether it runs forward again before its backward."""
    ends: int
    """End of the forward that its backward belongs to, as a position in ENDS."""


def align(programs: Sequence[Program], costs: Sequence[Sequence[float]]) -> tuple[Program, ...]:
    """Align the programs of all ranks, with idle instructions for ranks that have nothing to run.

    If ranks exchange prompts, the forwards of all prompts are aligned first. Then all ranks
    exchange. The rest of the programs is aligned separately.

    All results have the same number of instructions. Instructions at one position differ only in
    the microbatch. Each rank's instructions keep their order and their nesting. If any rank needs a
    pass of scores, all ranks have one. If any rank recomputes a slot, all ranks do. A forward runs
    as far as any rank needs in its slot, because all ranks must gather the weights of the head and
    of the last block. The result depends on the arguments alone, and is the same in every process.

    Args:
        programs: by rank, the `Plan.program` of each. Forwards may begin in any properly nested
            order.
        costs: by rank, for each microbatch of its plan, in any unit. Microbatches of similar costs
            then share slots.

    Raises:
        PlanError: there is no rank, or a program is not properly nested.
    """
    if not programs:
        raise PlanError("there are no programs to align; give one per rank, which may be empty.")
    if not any(program.exchanges for program in programs):
        return _align(programs, costs)
    parts = [split_at_exchanges(program) for program in programs]
    around, inside = (_align(part, costs) for part in zip(*parts, strict=True))
    scored = any(program.scores for program in programs)
    slots = 1 + max((i.slot for i in around[0].training), default=-1)
    scores = len(around[0].scores)
    found = []
    for one, other in zip(around, inside, strict=True):
        later = [i._replace(slot=i.slot + scores) for i in other.scores]
        later += [i._replace(slot=i.slot + slots) for i in other.training]
        found.append(around_and_inside(one, Program(tuple(later)), scores=scored))
    return tuple(found)


def _align(programs: Sequence[Program], costs: Sequence[Sequence[float]]) -> tuple[Program, ...]:
    nodes = [nodes_of(program) for program in programs]
    shapes = [tuple(node.parent for node in own) for own in nodes]
    parents, slots_of = common_forest(shapes, _costs(nodes, costs))
    again, ends = [False] * len(parents), [0] * len(parents)
    for own, shape in zip(nodes, shapes, strict=True):
        for node, slot in zip(own, slots_of[shape], strict=True):
            again[slot] |= node.recomputed
            ends[slot] = max(ends[slot], node.ends)
    score_ends = [[ENDS.index(i.ends_at) for i in program.scores] for program in programs]
    scores = [
        Instruction(SCORE, slot, IDLE, ENDS[max(found)], keeps_graph=False)
        for slot, found in enumerate(zip_longest(*score_ends, fillvalue=0))
    ]
    # If no rank ends forwards inside the last block, the host cannot, so idle ranks run the whole
    # block too.
    late = any(i.ends_at == BLOCKS for program in programs for i in program.instructions)
    training = nested_instructions(
        parents,
        [ENDS[end] for end in ends],
        again,
        early=BLOCKS if late else BOUNDARY,
    )
    found: list[Program] = []
    for program, own, shape in zip(programs, nodes, shapes, strict=True):
        score_of = {slot: i.microbatch for slot, i in enumerate(program.scores)}
        in_slot = dict(zip(slots_of[shape], (node.microbatch for node in own), strict=True))
        filled = [i._replace(microbatch=score_of.get(i.slot, IDLE)) for i in scores]
        filled += [i._replace(microbatch=in_slot.get(i.slot, IDLE)) for i in training]
        found.append(Program(tuple(filled)))
    return tuple(found)


def nodes_of(program: Program) -> list[Node]:
    """Nesting of the microbatches of a program, from its forwards and backwards.

    Raises:
        PlanError: a backward comes before the backward of a microbatch inside its own.
    """
    found: list[Node] = []
    opened: list[tuple[int, int]] = []
    for at, (operation, slot, microbatch, ends, *_) in enumerate(program.training):
        if operation == FORWARD:
            parent = opened[-1][1] if opened else NO_PARENT
            opened.append((slot, len(found)))
            found.append(Node(parent, microbatch, False, ENDS.index(ends)))
        elif not opened or opened[-1][0] != slot:
            raise PlanError(
                f"instruction {at} is the {operation} of slot {slot}, which is not the innermost "
                "open one.\nGive each forward one backward, in reverse order of the forwards."
            )
        elif operation == BACKWARD:
            opened.pop()
        else:
            node = opened[-1][1]
            found[node] = found[node]._replace(recomputed=True, ends=ENDS.index(ends))
    if opened:
        raise PlanError(
            f"a program ends before the backward of slot {opened[-1][0]}.\nGive each forward one "
            "backward."
        )
    return found


def _costs(nodes: Sequence[list[Node]], costs: Sequence[Sequence[float]]) -> list[list[float]]:
    """By rank, the cost of each node relative to the cost of the costliest microbatch."""
    own = [
        [0.0 if node.microbatch == IDLE else of_rank[node.microbatch] for node in nodes_of_rank]
        for nodes_of_rank, of_rank in zip(nodes, costs, strict=True)
    ]
    largest = max(chain.from_iterable(own), default=0.0) or 1.0
    return [
        [cost / largest * (AGAIN if node.recomputed else 1.0) for cost, node in pairs]
        for pairs in (zip(*both, strict=True) for both in zip(own, nodes, strict=True))
    ]


# The common forest
# ------------------------------------------------------------


def common_forest(
    shapes: Sequence[Shape], costs: Sequence[Sequence[float]]
) -> tuple[list[int], dict[Shape, Shape]]:
    """Find a forest of slots that contains all shapes, with a small total cost of its slots.

    The cost of a slot is that of its costliest microbatch, plus `SLOT_COST`. The largest shape
    comes first, and each other shape is merged into the result so far (progressive alignment, after
    Feng and Doolittle, Journal of Molecular Evolution 25 (1987), 351-360). Ranks of one shape get
    the same slots.

    Takes O(n m d) for each of the different shapes, for n and m microbatches and lists of d
    siblings.

    Args:
        shapes: by rank.
        costs: by rank, the cost of each microbatch; the largest is 1.

    Returns:
        For each slot in order of forwards, the slot around it; and for each shape, its slots. Every
        slot is used.
    """
    members: dict[Shape, Floats] = {}
    for shape, own in zip(shapes, costs, strict=True):
        members[shape] = np.maximum(members.get(shape, 0.0), np.asarray(own, np.float64))
    parents: list[int] = []
    highest = np.zeros(0)
    slots: dict[Shape, Shape] = {}
    # Equally large shapes are in an order that does not depend on the ranks.
    for shape in sorted(members, key=lambda shape: (len(shape), shape), reverse=True):
        parents, old, new = merged(parents, highest, shape, members[shape])
        slots = {known: tuple(old[slot] for slot in those) for known, those in slots.items()}
        slots[shape] = tuple(new)
        before, highest = highest, np.zeros(len(parents))
        highest[old] = before
        highest[new] = np.maximum(highest[new], members[shape])
    return parents, slots


def merged(
    base: Sequence[int], base_costs: Floats, shape: Sequence[int], costs: Floats
) -> tuple[list[int], list[int], list[int]]:
    """Merge two forests, with pairs of nodes that save the most cost.

    A pair of nodes saves the smaller of their costs, plus `SLOT_COST`. A node without a counterpart
    becomes a new node, around all following trees of the other forest or around none. A new node
    around some of them would sometimes save more. The exact alignment of ordered trees (Jiang, Wang
    and Zhang, Theoretical Computer Science 143 (1995), 137-148) allows that, and takes several
    times as long.

    Args:
        base: [n] parents.
        base_costs: [n]
        shape: [m] parents of the forest to merge into it.
        costs: [m]

    Returns:
        Parents of the result, and the positions in it of the nodes of the base [n] and of the other
        forest [m].
    """
    n, m = len(base), len(shape)
    below, after, _ = _links(base)
    below_m, after_m, end_m = _links(shape)
    saved = np.minimum.outer(base_costs, costs) + SLOT_COST
    # most[i, j]: the most that node i and its later siblings, with what is below them, can save
    # over node j and its later siblings. No node is n, or m.
    most = np.zeros((n + 1, m + 1))
    below_j, after_j = np.asarray(below_m[:-1], int), np.asarray(after_m[:-1], int)
    # Node j, its later siblings and what is below these, as pairs of a first and an end. For roots
    # that is all that follows, whose running maximum takes O(m).
    roots = np.asarray(shape, int) == NO_PARENT
    ends_j = np.where(roots, np.arange(m) + 1, np.asarray(end_m, int))
    lists = np.stack([np.arange(m), ends_j], axis=1).ravel()
    best = np.zeros(m + 1)
    for i in reversed(range(n)):
        inside, rest = most[below[i]], most[after[i]]
        over = saved[i] + inside[below_j] + rest[after_j]
        # Else i is new, around all of the others or none; or so are j and some that follow it.
        np.maximum(over, np.maximum(inside[:m], rest[:m]), out=best[:m])
        of_roots = np.maximum.accumulate(best[::-1])[:0:-1]
        most[i, :m] = np.where(roots, of_roots, np.maximum.reduceat(best, lists)[::2])

    parents: list[int] = []
    old, new = [0] * n, [0] * m
    todo = [(0, 0, NO_PARENT)]
    while todo:
        i, j, parent = todo.pop()
        if i == n and j == m:
            continue
        value = most[i, j]
        if j < m and value == most[i, after_m[j]]:  # j is new, around none
            uses, inside_of, follows = (False, True), (n, below_m[j]), (i, after_m[j])
        elif i < n and value == most[after[i], j]:
            uses, inside_of, follows = (True, False), (below[i], m), (after[i], j)
        elif value == most[i, below_m[j]]:  # j is new, around all
            uses, inside_of, follows = (False, True), (i, below_m[j]), (n, after_m[j])
        elif value == most[below[i], j]:
            uses, inside_of, follows = (True, False), (below[i], j), (after[i], m)
        else:
            uses, inside_of, follows = (True, True), (below[i], below_m[j]), (after[i], after_m[j])
        if uses[0]:
            old[i] = len(parents)
        if uses[1]:
            new[j] = len(parents)
        todo += [(*follows, parent), (*inside_of, len(parents))]
        parents.append(parent)
    return parents, old, new


def _links(parents: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """First children and next siblings [n + 1], where n is none, and ends of sibling lists [n].

    The list that a node is in, with all below, ends before the node `end`.
    """
    n = len(parents)
    ends = list(range(1, n + 1))  # one more than the last node below each
    for node in reversed(range(n)):
        if parents[node] != NO_PARENT:
            ends[parents[node]] = max(ends[parents[node]], ends[node])
    below = [node + 1 if ends[node] > node + 1 else n for node in range(n)]
    lists = [n if parent == NO_PARENT else ends[parent] for parent in parents]
    after = [n if end == last else end for end, last in zip(ends, lists, strict=True)]
    return [*below, n], [*after, n], lists
