"""Bytes that ranks of context parallelism send to one another."""

from collections.abc import Sequence

from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.program import BACKWARD, Program
from forkpoint.tree.microbatch import Microbatch


def context_bytes(shape: ModelShape, microbatches: Sequence[Microbatch], program: Program) -> int:
    """Bytes that one rank sends in the all-to-alls around attention, in forwards and backwards.

    Queries, keys, values and outputs of its tokens, but for those that it keeps. Inputs of
    recurrent layers are not counted.
    """
    ranks = shape.context
    queries = shape.heads * (shape.head_dim + shape.value_dim)
    every = shape.attention_layers * (queries + shape.boundary_elements * ranks)
    ends_early: set[int] = set()
    numbers = 0
    for instruction in program.instructions:
        if instruction.idle or instruction.exchanges:
            continue
        microbatch = microbatches[instruction.microbatch]
        backward = instruction.operation == BACKWARD
        if instruction.ends_at_boundary and not backward:
            ends_early.add(instruction.slot)
        # Of the last layer keys and values alone are read.
        sent = every - queries * (instruction.slot in ends_early)
        if backward and (shape.checkpointed or microbatch.checkpointing == "full"):
            sent *= 2
        numbers += -(-microbatch.tokens // ranks) * sent
    return numbers * shape.dtype_bytes * (ranks - 1) // ranks
