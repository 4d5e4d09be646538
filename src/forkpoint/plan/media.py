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
    mark_last_backward,
)
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import Absent, Media
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest

Counts = tuple[tuple[int, int], ...]
Call = tuple[int, ...]
"""Media that one call of an encoder encodes, as numbers among those of a batch; none: idle."""
MOST_TOKENS = 8192
"""Tokens of the media of one call, unless it has a single one. A call holds tensors of all."""


@dataclass(frozen=True)
class PlannedMedium:
    """One distinct image or video of a batch."""

    kind: str
    tokens: int
    """How many tokens stand for it."""
    readers: tuple[int, ...]
    """Indices of the microbatches that run some of these, ascending."""
    rollouts: int = 1
    """How often rollouts have it: runs of its encoder in dense training."""
    frames: int = 1
    """Parts of it, such as frames of a video, whose patches do not see those of others."""


def planned_media(
    batch: RolloutBatch, forest: Forest, microbatches: Sequence[Microbatch]
) -> tuple[PlannedMedium, ...]:
    """The media of a batch, in its order. Microbatches that other ranks run read none."""
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
    """By its grid [1, 3] of patches in time, height and width; 1 without one."""
    for name, value in medium.inputs.items():
        if name.endswith("_grid_thw") and tuple(value.shape) == (1, 3):
            return 1 if isinstance(value, Absent) else max(1, int(value[0][0]))
    return 1


@dataclass(frozen=True)
class CommonEncoders:
    """Encoder runs of ranks in lockstep, which all issue the collectives of each.

    A rank that has fewer media at a place of the common program than another one encodes an idle
    medium, with a gradient of zero.
    """

    scores: Counts
    """By instruction of the pass of scores: how many encoders run before it, and how many end
    after it."""
    training: Counts
    """Those of the pass of backwards."""
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
        """Those of ranks with these aligned programs and media.

        A step of training in which no rank reads a medium runs an encoder once, after the last
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
    """By position of an instruction: media that are encoded before it, and that end after it.

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
    """The instructions of one pass, with those of encoders.

    Args:
        training: whether it is the pass of backwards, which may have none.
        trains: whether the encoder has parameters that are trained.
        again: whether its backward runs it once more, so that no activations are kept.
        together: whether one call encodes the media of one kind that are read at the same times.
        counts: by instruction, how many encoders run before and end after it on ranks in lockstep;
            empty where no other rank waits for them.
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
    of_media = Instruction(0, ENCODE, IDLE, IDLE, keeps_graph=False)
    for at, instruction in enumerate(instructions):
        of_media = of_media._replace(pass_index=instruction.pass_index)
        for call in begins.get(at, ()):
            found.append(of_media._replace(media=call, keeps_graph=keeps))
        found.append(instruction)
        for call in ends.get(at, ()):
            found.append(of_media._replace(operation=end, media=call))
    if not begins:
        # Ordinary training runs the encoder and gives it zeros, which optimizers do not skip.
        call = tuple(sorted(range(len(media)), key=lambda n: media[n].tokens)[:1])
        found.append(of_media._replace(media=call, keeps_graph=keeps))
        found.append(of_media._replace(operation=end, media=call))
    return mark_last_backward(found).instructions
