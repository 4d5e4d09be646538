"""Programs of ranks brought to one common shape, so that all issue the same collectives."""

from collections.abc import Sequence

from forkpoint.plan.align import IDLE, align_shapes, shape_of
from forkpoint.plan.program import (
    BACKWARD,
    BLOCKS,
    ENDS,
    FORWARD,
    HEAD,
    RECOMPUTE,
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
    last = [_ends_of_recorded(program) for program in programs]
    for rank, nesting in enumerate(nestings):
        for position, slot in enumerate(common.slots[rank]):
            ends = last[rank][nesting.order[position]]
            needed[slot] = max(needed[slot], ENDS.index(ends))
    # A host that leaves early on no rank goes through all blocks instead.
    early = not any(i.ends_at == BLOCKS for program in programs for i in program.instructions)
    first = ENDS[0] if early else BLOCKS
    scores = max(len(program.scores) for program in programs)
    found = []
    for rank, nesting in enumerate(nestings):
        of = {IDLE: IDLE} | {at: own[rank][slot] for at, slot in enumerate(nesting.order)}
        microbatches = [of[at] for at in common.microbatches(rank)]
        training = [
            Instruction(
                int(scores > 0),
                operation,
                slot,
                microbatches[slot],
                _ends(operation, first, ENDS[needed[slot]], again=common.recomputed[slot]),
                not (operation == FORWARD and common.recomputed[slot]),
            )
            for operation, slot in common.operations
        ]
        if training:
            training[-1] = training[-1]._replace(last_backward=True)
        found.append(Program((*_scores(programs, rank, scores), *training)))
    return tuple(found)


def _ends(operation: str, first: str, last: str, *, again: bool) -> str:
    if operation == BACKWARD:
        return HEAD
    return first if operation == FORWARD and again else last


def _ends_of_recorded(program: Program) -> dict[int, str]:
    """By slot: how far the forward goes that its backward belongs to."""
    return {
        i.slot: i.ends_at
        for i in program.training
        if i.records and i.operation in (FORWARD, RECOMPUTE)
    }


def _scores(programs: Sequence[Program], rank: int, count: int) -> list[Instruction]:
    """The pass of scores of a rank, with as many instructions as that of the rank with most."""
    found = []
    for slot in range(count):
        here = [p.scores[slot] for p in programs if slot < len(p.scores)]
        ends = max((i.ends_at for i in here), key=ENDS.index)
        own = programs[rank].scores
        microbatch = own[slot].microbatch if slot < len(own) else IDLE
        found.append(Instruction(0, SCORE, slot, microbatch, ends, records=False))
    return found
