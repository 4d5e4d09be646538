"""Bytes that ranks of context parallelism send to one another."""

from collections.abc import Sequence

from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.program import BACKWARD, RECOMPUTE, Program
from forkpoint.tree.microbatch import Microbatch


def context_bytes(shape: ModelShape, microbatches: Sequence[Microbatch], program: Program) -> int:
    """Bytes that one rank sends in forwards and backwards: in the all-to-alls around attention
    (`ModelShape.exchanged_bytes`), and of prefix caches that are gathered for leaves dealt out."""
    ends_early: set[int] = set()
    nbytes = 0
    for instruction in program.instructions:
        if instruction.idle or instruction.exchanges:
            continue
        microbatch = microbatches[instruction.microbatch]
        backward = instruction.operation == BACKWARD
        if microbatch.gathered and instruction.operation != RECOMPUTE:
            nbytes += shape.gathered_bytes(microbatch.captured_tokens, backward=backward)
        if microbatch.parts:
            continue
        if instruction.ends_at_boundary and not backward:
            ends_early.add(instruction.slot)
        sent = shape.exchanged_bytes(microbatch.tokens, ends_early=instruction.slot in ends_early)
        if backward and (shape.checkpointed or microbatch.checkpointing == "full"):
            sent *= 2
        nbytes += sent
    return nbytes
