"""Images and videos of a plan: which microbatches read them, and when encoders run.

An encoder's features are a prefix cache: microbatches read them and leave gradients for them. So
each distinct medium is encoded once, before the first microbatch that reads it, and its encoder's
backward runs once, after the backward of the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap

import numpy as np

from forkpoint.plan.program import (
    ENCODE,
    ENCODE_BACKWARD,
    IDLE,
    RELEASE,
    Instruction,
    Program,
)
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import Absent, Media
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest

Counts = tuple[tuple[int, int], ...]
Call = tuple[int, ...]
"""Media that one call of an encoder encodes, as indices into the media of the batch; empty if
idle."""
MOST_TOKENS = 8192
"""Largest number of tokens of the media of one call with several media. A call holds the tensors of
all its media."""


@dataclass(frozen=True)
class PlannedMedium:
    """One distinct image or video of a batch."""

    kind: str
    tokens: int
    """Number of its placeholder tokens."""
    readers: tuple[int, ...]
    """Indices of the microbatches that run its placeholder tokens, ascending."""
    rollouts: int = 1
    """Number of its occurrences in rollouts. Dense training encodes each one."""
    frames: int = 1
    """Number of its frames. Patches attend only to patches of their frame."""


def planned_media(
    batch: RolloutBatch, forest: Forest, microbatches: Sequence[Microbatch]
) -> tuple[PlannedMedium, ...]:
    """Plan the media of a batch, in its order. Microbatches that other ranks run read none."""
    if batch.media_of is None:
        return ()
    microbatch_of = np.full(len(forest), -1, np.int64)
    for microbatch in microbatches:
        if microbatch.shared_prompt != "received":
            microbatch_of[list(microbatch.segments)] = microbatch.index
    first = forest.segment_tokens(batch.offsets) - forest.edge_offsets[:-1]
    tokens = np.repeat(first, forest.length) + np.arange(forest.edges)
    medium, reader = batch.media_of[tokens], np.repeat(microbatch_of, forest.length)
    assert batch.media_row is not None
    there = (medium >= 0) & (reader >= 0)
    begins = there & (batch.media_row[tokens] == 0)
    times = np.repeat(forest.multiplicity, forest.length)[begins]
    places = np.bincount(medium[begins], times, len(batch.media)).astype(int).tolist()
    reads = np.zeros((len(batch.media), len(microbatches)), bool)
    reads[medium[there], reader[there]] = True
    return tuple(
        PlannedMedium(
            medium.kind, medium.tokens, tuple(row.nonzero()[0].tolist()), count, _frames(medium)
        )
        for medium, row, count in zip(batch.media, reads, places, strict=True)
    )


def _frames(medium: Media) -> int:
    """Number of frames, from the grid [1, 3] of patches in time, height and width; 1 without a
    grid."""
    for name, value in medium.inputs.items():
        if name.endswith("_grid_thw") and tuple(value.shape) == (1, 3):
            return 1 if isinstance(value, Absent) else max(1, int(value[0][0]))
    return 1


@dataclass(frozen=True)
class CommonEncoders:
    """Encoder runs that all ranks have in lockstep, because each run issues collectives.

    If a rank has fewer media than another at a position of the common program, it encodes an idle
    medium, with a gradient of zero.
    """

    scores: Counts
    """For each instruction of the pass of scores, the number of encoders that run before it, and
    the number that end after it."""
    training: Counts
    """The same for the training pass."""
    trains: bool
    """Whether the encoder has parameters that are trained."""
    idle: Media

    @classmethod
    def of(
        cls,
        programs: Sequence[Program],
        media: Sequence[Sequence[PlannedMedium]],
        *,
        trains: bool,
        idle: Media,
    ) -> "CommonEncoders":
        """Encoder runs of ranks with these aligned programs and media.

        A training step in which no rank reads a medium runs an encoder once, after the last
        instruction.
        """

        def most(passes: Sequence[Sequence[Instruction]]) -> Counts:
            every = list(starmap(_places, zip(passes, media, strict=True)))
            return tuple(
                (
                    max(len(begins.get(at, ())) for begins, _ in every),
                    max(len(ends.get(at, ())) for _, ends in every),
                )
                for at in range(len(passes[0]))
            )

        scores, training = [p.scores for p in programs], [p.training for p in programs]
        return cls(most(scores), most(training), trains, idle)


def _places(
    instructions: Sequence[Instruction], media: Sequence[PlannedMedium], *, together: bool = False
) -> tuple[dict[int, list[Call]], dict[int, list[Call]]]:
    """By position of an instruction, the media that are encoded before it, and those that end after
    it.

    `together`: whether one call encodes media of a kind that begin and end at the same positions.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, instruction in enumerate(instructions):
        if not instruction.idle:
            first.setdefault(instruction.microbatch, at)
            last[instruction.microbatch] = at
    calls: list[tuple[int, int, Call]] = []
    latest: dict[tuple[int, int, str], int] = {}
    for number, medium in enumerate(media):
        readers = [m for m in medium.readers if m in first]
        if not readers:
            continue
        begin, end = min(first[m] for m in readers), max(last[m] for m in readers)
        at = latest.get((begin, end, medium.kind))
        call = () if at is None else calls[at][2]
        if call and together and sum(media[n].tokens for n in (*call, number)) <= MOST_TOKENS:
            assert at is not None
            calls[at] = begin, end, (*call, number)
        else:
            latest[begin, end, medium.kind] = len(calls)
            calls.append((begin, end, (number,)))
    begins: dict[int, list[Call]] = {}
    ends: dict[int, list[Call]] = {}
    for begin, end, call in calls:
        begins.setdefault(begin, []).append(call)
        ends.setdefault(end, []).append(call)
    return begins, ends


def with_encoders(
    instructions: Sequence[Instruction],
    media: Sequence[PlannedMedium],
    *,
    training: bool,
    trains: bool,
    again: bool = False,
    together: bool = False,
    counts: Counts = (),
) -> tuple[Instruction, ...]:
    """Add the instructions of encoders to those of one pass.

    Args:
        training: whether it is the training pass.
        trains: whether the encoder has parameters that are trained.
        again: whether backwards of encoders recompute their activations, so that none are kept.
        together: whether one call encodes media of one kind that begin and end at the same
            positions.
        counts: for each instruction, the numbers of encoders that run before it and end after it,
            on ranks in lockstep; empty without lockstep.
    """
    begins, ends = _places(instructions, media, together=together)
    for at, (begin, ended) in enumerate(counts):
        for places, count in ((begins, begin), (ends, ended if training and trains else 0)):
            own = places.get(at, [])
            if count > len(own):
                places[at] = [*own, *[()] * (count - len(own))]
    if not begins and not (training and trains):
        return tuple(instructions)
    end = ENCODE_BACKWARD if training and trains else RELEASE
    keeps = end == ENCODE_BACKWARD and not again
    found: list[Instruction] = []
    of_media = Instruction(ENCODE, IDLE, IDLE, keeps_graph=False)
    for at, instruction in enumerate(instructions):
        for call in begins.get(at, ()):
            found.append(of_media._replace(media=call, keeps_graph=keeps))
        found.append(instruction)
        for call in ends.get(at, ()):
            found.append(of_media._replace(operation=end, media=call))
    if not begins:
        # Dense training runs the encoder with gradients of zero, for which optimizers still update.
        call = tuple(sorted(range(len(media)), key=lambda n: media[n].tokens)[:1])
        found.append(of_media._replace(media=call, keeps_graph=keeps))
        found.append(of_media._replace(operation=end, media=call))
    return tuple(found)
