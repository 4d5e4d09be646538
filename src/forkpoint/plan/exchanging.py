"""Programs of ranks that exchange prefix caches of trunks, and what these cost.

A trunk is run by the rank that owns it. All ranks meet twice: when the prefix caches of all trunks
are there, and when the gradients of these are. Between the two each runs the rest of its program.
"""

from collections.abc import Iterable, Sequence

from forkpoint.errors import PlanError
from forkpoint.plan.align import align
from forkpoint.plan.program import (
    BACKWARD,
    FORWARD,
    IDLE,
    RETURN,
    SHARE,
    Instruction,
    Program,
)
from forkpoint.tree import Microbatch


def exchanging(program: Program, microbatches: Sequence[Microbatch], *, scores: bool) -> Program:
    """The program of a rank that exchanges trunks with others in the step.

    It does not run the microbatch that it receives. All ranks have run the forwards of trunks that
    they send, and nothing else, before the prefix caches are exchanged, and run the backwards of
    these last, once they have the gradients.

    Args:
        program: what `step_program` gave; trunks lie around everything else.
        microbatches: those of the plan.
        scores: whether a pass of scores comes first on any rank.
    """
    trunks = {m.index: m.trunk for m in microbatches if m.trunk}

    def parts(instructions: Iterable[Instruction]) -> tuple[list[Instruction], list[Instruction]]:
        own = [i for i in instructions if trunks.get(i.microbatch) != "received"]
        return (
            [i for i in own if i.microbatch in trunks],
            [i for i in own if i.microbatch not in trunks],
        )

    found: list[Instruction] = []
    number = int(scores)
    if scores:
        around, inside = parts(program.scores)
        found += [*around, Instruction(0, SHARE, 0, IDLE, records=False), *inside]
    around, inside = parts(program.training)
    forwards = [i for i in around if i.operation == FORWARD]
    backwards = [i for i in around if i.operation != FORWARD]
    share, back = (Instruction(number, operation, 0, IDLE) for operation in (SHARE, RETURN))
    every = [*forwards, share, *inside, back, *backwards]
    found += [i._replace(pass_index=number, last_backward=False) for i in every]
    return marked(found)


def marked(instructions: Sequence[Instruction]) -> Program:
    """The program of these instructions, with its last backward, and no other, as the last."""
    found = [i._replace(last_backward=False) for i in instructions]
    for at in reversed(range(len(found))):
        if found[at].operation == BACKWARD:
            found[at] = found[at]._replace(last_backward=True)
            break
    return Program(tuple(found))


def align_exchanging(
    programs: Sequence[Program], costs: Sequence[Sequence[float]] | None = None
) -> tuple[Program, ...]:
    """Give programs that exchange trunks one common shape, as `align` does for others.

    Forwards of trunks meet one another, whatever ranks own them, then all ranks exchange, and the
    rest of the programs is aligned by itself.

    Args:
        programs: by rank; what `exchanging` gave, with the same passes on all.
        costs: as `align` takes them.
    """
    scored = any(program.scores for program in programs)
    parts = [_parts(program) for program in programs]
    around = align([_outer(one) for one in parts], costs)
    inside = align([Program((*one[1], *one[3])) for one in parts], costs)
    slots = 1 + max((i.slot for i in around[0].training), default=-1)
    number = int(scored)
    share = Instruction(number, SHARE, 0, IDLE)
    found = []
    for outer, inner in zip(around, inside, strict=True):
        every: list[Instruction] = []
        if scored:
            every += [*outer.scores, Instruction(0, SHARE, 0, IDLE, records=False)]
            every += [i._replace(slot=i.slot + len(outer.scores)) for i in inner.scores]
        opening = [i for i in outer.training if i.operation == FORWARD]
        closing = list(outer.training[len(opening) :])
        if any(i.operation == FORWARD for i in closing):
            raise PlanError("programs whose trunks do not lie around one another cannot be aligned")
        within = [i._replace(slot=i.slot + slots) for i in inner.training]
        training = [*opening, share, *within, share._replace(operation=RETURN), *closing]
        every += [i._replace(pass_index=number) for i in training]
        found.append(marked(every))
    return tuple(found)


def _parts(program: Program) -> list[list[Instruction]]:
    """Instructions before and after each exchange: of the scores (two), and of the rest (three)."""
    found: list[list[Instruction]] = [[]]
    if not program.scores:
        found.append([])
        found.append([])
    for instruction in program.scores:
        if instruction.exchanges:
            found.append([])
        else:
            found[-1].append(instruction)
    if program.scores:
        found.append([])
    for instruction in program.training:
        if instruction.exchanges:
            found.append([])
        else:
            found[-1].append(instruction)
    assert len(found) == 5
    return found


def _outer(parts: list[list[Instruction]]) -> Program:
    """Instructions around the exchanges."""
    return Program((*parts[0], *parts[2], *parts[4]))
