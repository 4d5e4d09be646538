"""Programs of ranks brought to one common shape, so that all issue the same collectives."""

from collections.abc import Sequence

from forkpoint.plan.align import IDLE, align_shapes, shape_of
from forkpoint.plan.program import (
    BACKWARD,
    BLOCKS,
    ENDS,
    FORWARD,
    HEAD,
    SCORE,
    Instruction,
    Program,
)


def align(
    programs: Sequence[Program], costs: Sequence[Sequence[float]] | None = None
) -> tuple[Program, ...]:
    """Give the programs of all ranks one common shape, with idle instructions where one has
    nothing to do.

    All results have the same number of instructions. At each position they agree in the pass, the
    operation, the slot, how far a forward goes, whether it records, and whether it is the last
    backward. They differ in the microbatch. Each rank's own instructions keep their order and
    their nesting (see `forkpoint.plan.align`). If any rank needs a pass of scores all have one, if
    any rank computes a slot again all do, and a forward goes as far as any rank needs in its slot:
    ranks that gather weights of the head or of the last block then all do so.

    Args:
        programs: by rank; those of `Plan.program`, which begin forwards in any order that nests.
        costs: by rank, by microbatch of its plan: predicted milliseconds, or any other unit.
            Microbatches of similar costs then share slots. None: all equal.

    Raises:
        PlanError: there is no rank, or a program is not properly nested.
    """
    nestings = [shape_of((i.operation, i.slot) for i in program.training) for program in programs]
    own = [{i.slot: i.microbatch for i in program.training} for program in programs]
    by_order = None
    if costs is not None:
        by_order = [
            [0.0 if of[slot] == IDLE else cost[of[slot]] for slot in nesting.order]
            for cost, of, nesting in zip(costs, own, nestings, strict=True)
        ]
    common = align_shapes(
        [nesting.parents for nesting in nestings],
        by_order,
        [nesting.recomputed for nesting in nestings],
    )
    # How far each slot's forward that records must go: as far as any rank needs.
    needed = [0] * len(common.parents)
    for program, nesting, slots in zip(programs, nestings, common.slots, strict=True):
        ends = _ends_of_recorded(program)
        for own_slot, slot in zip(nesting.order, slots, strict=True):
            needed[slot] = max(needed[slot], ends[own_slot])
    # A host that leaves early on no rank goes through all blocks instead.
    early = not any(i.ends_at == BLOCKS for program in programs for i in program.instructions)
    first = ENDS[0] if early else BLOCKS
    scores = _idle_scores(programs)
    idle = [
        Instruction(
            int(len(scores) > 0),
            operation,
            slot,
            IDLE,
            _ends(operation, first, ENDS[needed[slot]], again=common.recomputed[slot]),
            not (operation == FORWARD and common.recomputed[slot]),
        )
        for operation, slot in common.operations
    ]
    if idle:
        idle[-1] = idle[-1]._replace(last_backward=True)
    places: list[list[int]] = [[] for _ in common.parents]
    for place, (_, slot) in enumerate(common.operations):
        places[slot].append(place)
    found = []
    for rank, nesting in enumerate(nestings):
        training = idle.copy()
        for own_slot, slot in zip(nesting.order, common.slots[rank], strict=True):
            microbatch = own[rank][own_slot]
            for place in places[slot]:
                training[place] = _with_microbatch(idle[place], microbatch)
        of_rank = scores.copy()
        for place, instruction in enumerate(programs[rank].scores):
            of_rank[place] = _with_microbatch(scores[place], instruction.microbatch)
        found.append(Program((*of_rank, *training)))
    return tuple(found)


def _with_microbatch(idle: Instruction, microbatch: int) -> Instruction:
    # In place of _replace, which takes five times as long.
    return Instruction(*idle[:3], microbatch, *idle[4:])


def _ends(operation: str, first: str, last: str, *, again: bool) -> str:
    if operation == BACKWARD:
        return HEAD
    return first if operation == FORWARD and again else last


def _ends_of_recorded(program: Program) -> dict[int, int]:
    """By slot: how far the forward goes that its backward belongs to, as a place in ENDS."""
    return {
        i.slot: ENDS.index(i.ends_at)
        for i in program.training
        if i.records and i.operation != BACKWARD
    }


def _idle_scores(programs: Sequence[Program]) -> list[Instruction]:
    """The pass of scores of a rank without microbatches: as long as that of the rank with most."""
    needed: list[int] = []
    for program in programs:
        ends = [ENDS.index(i.ends_at) for i in program.scores]
        needed += [0] * (len(ends) - len(needed))
        needed[: len(ends)] = map(max, ends, needed)
    return [
        Instruction(0, SCORE, slot, IDLE, ENDS[ends], records=False)
        for slot, ends in enumerate(needed)
    ]
