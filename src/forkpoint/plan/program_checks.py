"""Checks of a program that was read or made elsewhere: it must compute what its plan says."""

from collections import Counter

from forkpoint.errors import PlanError
from forkpoint.plan.contents import PlanContents
from forkpoint.plan.program import (
    BACKWARD,
    BLOCKS,
    BOUNDARY,
    FORWARD,
    HEAD,
    IDLE,
    OPERATIONS,
    RECOMPUTE,
    RETURN,
    SCORE,
    SHARE,
    Instruction,
    check_order,
)

REMEDY = "Make the plan again."


def check_program(plan: PlanContents) -> None:
    """Refuse a program that would not compute the step of its plan.

    Raises:
        PlanError: a microbatch runs more or less often than it must, in another order than its
            dependencies allow, not as far as it must, or in several slots.
    """
    instructions = plan.program.instructions
    scores, training = plan.program.scores, plan.program.training
    _require(
        instructions == (*scores, *training),
        "its program has scores after other instructions, or among them",
    )
    for number, part in enumerate(part for part in (scores, training) if part):
        _require(
            all(instruction.pass_index == number for instruction in part),
            f"its program numbers instructions of pass {number} otherwise",
        )
        _check_slots(tuple(i for i in part if not i.exchanges))
        exchanges = [(i.operation, i.slot, i.microbatch) for i in part if i.exchanges]
        wanted = [(SHARE, 0, IDLE), (RETURN, 0, IDLE)][: 2 if part is training else 1]
        _require(
            exchanges == (wanted if plan.split == "exchange" else []),
            "its program exchanges trunks with other ranks otherwise than it says",
        )
    _check_each(plan, scores, training)
    backwards = [i.last_backward for i in instructions if i.operation == BACKWARD]
    _require(
        sum(i.last_backward for i in instructions) == sum(backwards[-1:]) == len(backwards[-1:]),
        "its program does not mark its last backward, and that alone, as the last",
    )
    check_order(plan.waits_for(), range(len(plan.program.units)))


def _check_each(
    plan: PlanContents, scores: tuple[Instruction, ...], training: tuple[Instruction, ...]
) -> None:
    """Each microbatch has its forward and backward, and goes as far as it must."""
    every = {microbatch.index for microbatch in plan.microbatches}
    own = [i for i in (*scores, *training) if not i.idle]
    _require(
        all(i.microbatch in every for i in own), "its program names microbatches that it has not"
    )
    count = Counter((i.operation, i.microbatch) for i in own)
    of = {(i.operation, i.microbatch): i for i in own}
    scored = any(i.operation == SCORE for i in own)
    for microbatch in plan.microbatches:
        index = microbatch.index
        if microbatch.trunk == "received":
            times = sum(count[operation, index] for operation in OPERATIONS)
            _require(times == 0, f"its program runs microbatch {index}, which is received")
            continue
        again = (RECOMPUTE, index) in of
        wanted = {FORWARD: 1, RECOMPUTE: int(again), BACKWARD: 1, SCORE: int(scored)}
        for operation, times in wanted.items():
            _require(
                count[operation, index] == times,
                f"its program has {count[operation, index]} times {operation!r} of microbatch "
                f"{index}, and {times} is needed",
            )
        _require(
            again or microbatch.activations != "recompute",
            f"its program never computes the activations of microbatch {index} again, which are "
            "not kept",
        )
        _require(
            of[FORWARD, index].records is not again
            and (not again or of[RECOMPUTE, index].records)
            and (not scored or not of[SCORE, index].records),
            f"its program records activations of microbatch {index} where it must not, or does not "
            "where it must",
        )
        last = of[RECOMPUTE if again else FORWARD, index]
        for instruction in (last, *([of[SCORE, index]] if scored else [])):
            _require(
                instruction.ends_at == HEAD
                or (instruction.ends_at == BOUNDARY and not microbatch.labelled),
                f"its program ends the {instruction.operation} of microbatch {index} at "
                f"{instruction.ends_at!r}, and it has {microbatch.labelled} labels",
            )
    leaving = [i for i in own if i.ends_at == BOUNDARY]
    _require(
        plan.capabilities.leaves_early or not leaving,
        "its program leaves the last block early, and the host that it is made for cannot",
    )


def _check_slots(part: tuple[Instruction, ...]) -> None:
    """In one pass, a slot is of one microbatch, and a microbatch has one slot."""
    pairs = {(i.slot, i.microbatch) for i in part}
    own = [pair for pair in pairs if pair[1] >= 0]
    _require(
        len({slot for slot, _ in pairs}) == len(pairs)
        and len({microbatch for _, microbatch in own}) == len(own),
        "its program has a slot of several microbatches, or a microbatch in several slots",
    )
    by_slot = Counter((i.slot, i.operation) for i in part)
    forwards = {slot for slot, operation in by_slot if operation in (SCORE, FORWARD)}
    for (slot, operation), times in by_slot.items():
        _require(
            times == 1 and slot in forwards,
            f"its program has {times} times {operation!r} in slot {slot}, or no forward there",
        )
    _require(
        all(i.ends_at in (BOUNDARY, BLOCKS, HEAD) for i in part),
        f"its program ends forwards elsewhere than at {BOUNDARY!r}, {BLOCKS!r} or {HEAD!r}",
    )


def _require(held: bool, message: str) -> None:
    if not held:
        raise PlanError(f"this plan is damaged: {message}. {REMEDY}")
