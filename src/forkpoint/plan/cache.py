"""Slots of the prefix cache, given by lifetime once the instructions are in order.

A microbatch captures what other microbatches read of it. It takes slots when its forward (or
score) runs, and gives them back after its backward, or in a pass of scores after the last score
below it. Trunks that another rank sends live from the exchange of caches to that of gradients.

Each microbatch takes one run of slots, the first that is free. In the program of one device
microbatches nest, so this is a stack: a path through microbatches of one segment each (a chain, a
prefix and its suffixes) lies in one run, and `tokens` is the most that is live at once. In other
orders there may be gaps: a microbatch of n tokens begins at most `live + count * (n - 1)` slots
from the start, where `count` microbatches of `live` tokens in all live at the same time as it does.

Layers that attend keep something for every token of a segment, and all microbatches below read it.
Layers that carry a state keep one for the segment's end, which only its own children start from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from forkpoint.plan.program import BACKWARD, FORWARD, RETURN, SCORE, SHARE, Instruction, Program
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest


def allocate_cache(
    forest: Forest, microbatches: Sequence[Microbatch], program: Program
) -> tuple[tuple[Microbatch, ...], int, int]:
    """Give cache slots to every segment that another microbatch reads.

    Args:
        forest: the plan's forest.
        microbatches: those of the plan, by their index.
        program: their instructions, in the order in which they run.

    Returns:
        The microbatches with `cache_begin` and `state_index` set, and how many slots the cache
        needs for tokens and for states.
    """
    read, forks = captured_segments(forest, microbatches)
    tokens = {
        m.index: sum(int(forest.length[s]) for s in m.segments if s in read) for m in microbatches
    }
    states = {m.index: sum(s in forks for s in m.segments) for m in microbatches}
    together = _live_together(program, microbatches, {i for i, count in tokens.items() if count})
    begin_of, cache_tokens = _first_fit(tokens, together)
    state_of, cache_states = _first_fit(states, together)
    placed: list[Microbatch] = []
    for microbatch in microbatches:
        at, state = begin_of.get(microbatch.index, 0), state_of.get(microbatch.index, 0)
        begins, indices = [], []
        for segment in microbatch.segments:
            begins.append(at if segment in read else -1)
            at += int(forest.length[segment]) if segment in read else 0
            indices.append(state if segment in forks else -1)
            state += segment in forks
        found = tuple(begins), tuple(indices)
        if found != (microbatch.cache_begin, microbatch.state_index):
            microbatch = replace(microbatch, cache_begin=found[0], state_index=found[1])
        placed.append(microbatch)
    return tuple(placed), cache_tokens, cache_states


def captured_segments(
    forest: Forest, microbatches: Sequence[Microbatch]
) -> tuple[set[int], set[int]]:
    """Segments that other microbatches attend to, and those among them that have a child there."""
    microbatch_of = {
        s: microbatch.index for microbatch in microbatches for s in microbatch.segments
    }
    parents = forest.parent.tolist()
    forks = {
        parent
        for segment, parent in enumerate(parents)
        if parent >= 0 and microbatch_of[parent] != microbatch_of[segment]
    }
    read = set(forks)
    # A segment above one that is read elsewhere is read by the same microbatches, unless it lies in
    # theirs.
    for segment in forks:
        parent = parents[segment]
        while parent >= 0 and parent not in read:
            read.add(parent)
            parent = parents[parent]
    return read, forks


def _live_together(
    program: Program, microbatches: Sequence[Microbatch], captures: set[int]
) -> dict[int, set[int]]:
    """By microbatch that captures: the others that are live at the same time in some pass.

    In the order of their captures in the last pass.
    """
    received = [m.index for m in microbatches if m.trunk == "received"]
    together: dict[int, set[int]] = {}
    for instructions in program.passes:
        order: dict[int, set[int]] = {}
        live: set[int] = set()
        ends = _ends(instructions, microbatches, received)
        for at, instruction in enumerate(instructions):
            begun: Sequence[int] = ()
            if instruction.operation == SHARE:
                begun = received
            elif instruction.operation in (SCORE, FORWARD):
                begun = (instruction.microbatch,)
            for microbatch in begun:
                if microbatch in captures:
                    order[microbatch] = live | together.get(microbatch, set())
                    for other in live:
                        order[other].add(microbatch)
                    live.add(microbatch)
            live.difference_update(ends.get(at, ()))
        together = order
    return together


def _ends(
    instructions: Sequence[Instruction], microbatches: Sequence[Microbatch], received: list[int]
) -> dict[int, list[int]]:
    """By position in a pass: the microbatches whose prefix cache is not read from there on."""
    last: dict[int, int] = {}
    for at, instruction in enumerate(instructions):
        if instruction.operation == SCORE:
            above = instruction.microbatch
            while above >= 0:
                last[above] = at
                above = microbatches[above].parent
        elif instruction.operation == BACKWARD:
            last[instruction.microbatch] = at
        elif instruction.operation == RETURN:
            last |= dict.fromkeys(received, at)
    ends: dict[int, list[int]] = {}
    for microbatch, at in last.items():
        ends.setdefault(at, []).append(microbatch)
    return ends


def _first_fit(
    sizes: Mapping[int, int], together: Mapping[int, set[int]]
) -> tuple[dict[int, int], int]:
    """The first slot of each microbatch, and how many slots there are."""
    begin_of: dict[int, int] = {}
    total = 0
    for microbatch, others in together.items():
        size, at = sizes[microbatch], 0
        taken = sorted((begin_of[o], begin_of[o] + sizes[o]) for o in others if o in begin_of)
        for begin, end in taken:
            if begin - at >= size:
                break
            at = max(at, end)
        begin_of[microbatch] = at
        total = max(total, at + size)
    return begin_of, total
