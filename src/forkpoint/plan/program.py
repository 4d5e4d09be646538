"""The program of a plan: every operation of a step, in order, as plain data.

The engine runs the instructions in order and makes no decisions. Predictions of time and memory use
the same list. `waits_for` gives the dependencies of each unit of instructions, so that a scheduler
can order them differently (`Plan.reordered`). Slots of the prefix cache are assigned after the
order is known (`plan.cache`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from forkpoint.errors import PlanError
from forkpoint.tree import Microbatch

SCORE, FORWARD, RECOMPUTE, BACKWARD = "score", "forward", "recompute", "backward"
SHARE, RETURN = "share", "return"
ENCODE, ENCODE_BACKWARD, RELEASE = "encode", "encode backward", "release"
OF_MEDIA = (ENCODE, ENCODE_BACKWARD, RELEASE)
BOUNDARY, BLOCKS, HEAD = "boundary", "blocks", "head"
ENDS = (BOUNDARY, BLOCKS, HEAD)
"""Ends of a forward, the earliest first."""
IDLE = -1
"""Index instead of a microbatch if this rank has none for the slot."""

PREFIX_FORWARD, LEAF, PREFIX_BACKWARD = "prefix forward", "leaf", "prefix backward"
PHASES: tuple[str, ...] = (PREFIX_FORWARD, LEAF, PREFIX_BACKWARD)


class Instruction(NamedTuple):
    """One operation on one microbatch."""

    operation: str
    """SCORE: a forward without a graph. FORWARD. RECOMPUTE: the forward again, for activations that
    were not kept. BACKWARD. SHARE: ranks send prefix caches of prompts to one another. RETURN:
    ranks return the gradients of these caches. ENCODE: a forward of the encoder of images or
    videos. ENCODE_BACKWARD: its backward. RELEASE: features without a gradient are freed. SHARE and
    RETURN have no microbatch, and all ranks of the step run them. The last three have no microbatch
    either; `plan.media.with_encoders` adds them to passes, and programs do not have them."""
    slot: int
    """The place in the nesting of forwards and backwards. Ranks whose programs were aligned run
    the same slots at the same time. In the program of one device it is the microbatch."""
    microbatch: int
    """Index in `Plan.microbatches`, or IDLE."""
    ends_at: str = HEAD
    """End of a forward. BOUNDARY: inside the last block, after the data that other microbatches
    read. BLOCKS: after all blocks, without the head. HEAD: after the head."""
    keeps_graph: bool = True
    """Whether autograd keeps the activations of a forward for its backward. False for scores, and
    for a forward that is repeated by a RECOMPUTE or an ENCODE_BACKWARD."""
    last_backward: bool = False
    """Whether it is the last backward of the step, after which gradients may be reduced. It is set
    when a pass runs (`mark_last_backward`)."""
    media: tuple[int, ...] = ()
    """Media that one call encodes, as indices into the media of the batch; empty if idle."""

    @property
    def idle(self) -> bool:
        """Whether the rank has no microbatch here.

        An idle forward runs one token and an idle backward a gradient of zero, so that the rank
        takes part in the collectives of the other ranks.
        """
        return self.microbatch == IDLE

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange prefix caches or their gradients."""
        return self.operation in (SHARE, RETURN)

    @property
    def runs_microbatch(self) -> bool:
        """Whether it runs a microbatch or an idle one. Features run other instructions."""
        return not self.exchanges and self.operation not in OF_MEDIA

    @property
    def counts_routing(self) -> bool:
        """Whether this forward counts in router statistics. If a microbatch has two forwards in a
        pass, only the second counts."""
        return not self.idle and (self.keeps_graph or self.operation == SCORE)


@dataclass(frozen=True)
class Program:
    """Instructions in their order.

    A loss that couples rollouts of several microbatches needs two passes over the microbatches:
    scores, then forwards and backwards.
    """

    instructions: tuple[Instruction, ...] = ()

    @cached_property
    def units(self) -> tuple[tuple[Instruction, ...], ...]:
        """Units that a scheduler orders, of the training pass: a RECOMPUTE with its BACKWARD, and
        every other instruction alone.

        Nothing runs between the two, because recomputed activations take memory until the backward.
        """
        found: list[tuple[Instruction, ...]] = []
        for instruction in self.training:
            if found and found[-1][-1].operation == RECOMPUTE:
                found[-1] = (*found[-1], instruction)
            else:
                found.append((instruction,))
        return tuple(found)

    @cached_property
    def scores(self) -> tuple[Instruction, ...]:
        """The instructions of the pass of scores; empty without one."""
        return tuple(i for i in self.instructions if _scores(i))

    @cached_property
    def training(self) -> tuple[Instruction, ...]:
        """The instructions of the pass of forwards and backwards."""
        return tuple(i for i in self.instructions if not _scores(i))

    @property
    def has_scores(self) -> bool:
        """Whether the loss is computed from scores of this rank's microbatches. False if all scores
        are idle."""
        return any(not i.idle for i in self.scores)

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange prefix caches in it."""
        return any(i.exchanges for i in self.instructions)


def _scores(instruction: Instruction) -> bool:
    """Whether an instruction belongs to the pass of scores. The exchange of that pass keeps no
    graph."""
    operation = instruction.operation
    return operation == SCORE or (operation == SHARE and not instruction.keeps_graph)


def mark_last_backward(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The instructions of a pass, with the last backward marked as the last of the step."""
    ends = (BACKWARD, ENCODE_BACKWARD)
    last = max((at for at, i in enumerate(instructions) if i.operation in ends), default=None)
    return tuple(i._replace(last_backward=at == last) for at, i in enumerate(instructions))


def phase_of(operation: str, microbatch: Microbatch) -> str:
    """Phase to which the time of an operation counts: "prefix forward", "leaf" or "prefix
    backward"."""
    if not microbatch.children:
        return LEAF
    return PREFIX_FORWARD if operation in (SCORE, FORWARD) else PREFIX_BACKWARD


def step_program(
    microbatches: Sequence[Microbatch], *, scores: bool = False, leaves_early: bool = True
) -> Program:
    """Program of a step on one device: children run between the forward and the backward of their
    parent.

    Args:
        microbatches: in visiting order, every microbatch after its parent.
        scores: whether a pass of scores comes first.
        leaves_early: as in `Capabilities`.
    """
    first = score_program(microbatches, leaves_early=leaves_early).instructions if scores else ()
    training = nested_instructions(
        [m.parent for m in microbatches],
        [_ends(m, leaves_early) for m in microbatches],
        [m.activations == "recompute" for m in microbatches],
        early=BOUNDARY if leaves_early else BLOCKS,
    )
    return Program((*first, *training))


def nested_instructions(
    parents: Sequence[int], ends: Sequence[str], again: Sequence[bool], *, early: str
) -> list[Instruction]:
    """Forwards and backwards of slots, with each slot's children between its forward and its
    backward.

    Arguments for each slot, in order of forwards: the slot around it, or -1; the end of the forward
    that its backward belongs to; and whether that is a RECOMPUTE, after a forward that ends at
    `early`.
    """
    found: list[Instruction] = []
    opened: list[int] = []
    for slot, parent in enumerate((*parents, IDLE)):
        while opened and opened[-1] != parent:
            closed = opened.pop()
            if again[closed]:
                found.append(Instruction(RECOMPUTE, closed, closed, ends[closed]))
            found.append(Instruction(BACKWARD, closed, closed))
        if slot < len(parents):
            end = early if again[slot] else ends[slot]
            found.append(Instruction(FORWARD, slot, slot, end, not again[slot]))
            opened.append(slot)
    return found


def score_program(microbatches: Sequence[Microbatch], *, leaves_early: bool = True) -> Program:
    """Program of a pass of scores: a forward without a graph for every microbatch, in visiting
    order."""
    return Program(
        tuple(
            Instruction(SCORE, m.index, m.index, _ends(m, leaves_early), keeps_graph=False)
            for m in microbatches
        )
    )


def _ends(microbatch: Microbatch, leaves_early: bool) -> str:
    """A microbatch without trained tokens runs only for its prefix cache."""
    return BOUNDARY if leaves_early and not microbatch.num_loss_entries else HEAD


# Dependencies
# ------------------------------------------------------------


def waits_for(
    program: Program, microbatches: Sequence[Microbatch], parents: Sequence[frozenset[int]]
) -> tuple[tuple[int, ...], ...]:
    """For each unit of a program, the positions of the units for which it waits directly.

    A forward waits for the forwards of the microbatches that it reads. A backward, with its
    recompute, waits for the forward and for the backwards of the microbatches that read its prefix
    cache. Scores come before all units.

    parents: for each microbatch, the microbatches that hold parents of its segments.
    """
    units = [unit[-1] for unit in program.units]
    forward_in = {i.slot: at for at, i in enumerate(units) if i.operation == FORWARD}
    forwards = {i.microbatch: at for at, i in enumerate(units) if i.operation == FORWARD}
    backwards = {i.microbatch: at for at, i in enumerate(units) if i.operation == BACKWARD}
    shares = [at for at, i in enumerate(units) if i.operation == SHARE]
    returns = [at for at, i in enumerate(units) if i.operation == RETURN]
    readers: list[list[int]] = [[] for _ in microbatches]
    for reader, above in enumerate(parents):
        for parent in above:
            readers[parent].append(reader)
    received = {m.index for m in microbatches if m.shared_prompt == "received"}
    prompts = {m.index for m in microbatches if m.shared_prompt}
    found: list[list[int]] = []
    for operation, slot, index in ((i.operation, i.slot, i.microbatch) for i in units):
        waits: list[int] = []
        if operation == SHARE:
            waits = [at for m, at in forwards.items() if m in prompts]
        elif operation == RETURN:
            waits = [at for m, at in backwards.items() if m != IDLE and m not in prompts]
        elif operation == FORWARD and index != IDLE:
            waits = [forwards[p] for p in parents[index] if p not in received]
            waits += [] if index in prompts else shares
        elif operation == BACKWARD:
            waits = [forward_in[slot]]
            if index != IDLE:
                waits += [backwards[reader] for reader in readers[index]]
                waits += returns if index in prompts else []
        found.append(waits)
    return tuple(tuple(sorted(set(waits))) for waits in found)


def check_order(waits: Sequence[Iterable[int]], order: Sequence[int]) -> None:
    """Refuse an order in which a unit runs before a unit for which it waits.

    order: positions of units, in the order in which they are to run.

    Raises:
        PlanError: a unit runs too early, twice or never.
    """
    if sorted(order) != list(range(len(waits))):
        raise PlanError(
            f"the order has {len(order)} entries, {len(set(order))} of them different, and the "
            f"program {len(waits)} units; give the position of each unit once."
        )
    done: set[int] = set()
    for at in order:
        missing = sorted(set(waits[at]) - done)
        if missing:
            raise PlanError(
                f"unit {at} runs before unit {missing[0]}, which it waits for; run that one first."
            )
        done.add(at)
