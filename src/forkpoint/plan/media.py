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
    instructions: Sequence[Instruction], media: Sequence[PlannedMedium]
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """By position of an instruction: media that are encoded before it, and that end after it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, instruction in enumerate(instructions):
        if not instruction.idle:
            first.setdefault(instruction.microbatch, at)
            last[instruction.microbatch] = at
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for number, medium in enumerate(media):
        places = [first[m] for m in medium.readers if m in first]
        if places:
            begins.setdefault(min(places), []).append(number)
            ends.setdefault(max(last[m] for m in medium.readers if m in last), []).append(number)
    return begins, ends


def with_encoders(
    instructions: Sequence[Instruction],
    media: Sequence[PlannedMedium],
    *,
    training: bool,
    trains: bool,
    again: bool = False,
    counts: Counts = (),
) -> tuple[Instruction, ...]:
    """The instructions of one pass, with those of encoders.

    Args:
        training: whether it is the pass of backwards, which may have none.
        trains: whether the encoder has parameters that are trained.
        again: whether its backward runs it once more, so that no activations are kept.
        counts: by instruction, how many encoders run before and end after it on ranks in lockstep;
            empty where no other rank waits for them.
    """
    begins, ends = _places(instructions, media)
    for at, (begin, ended) in enumerate(counts):
        for places, count in ((begins, begin), (ends, ended if training and trains else 0)):
            own = places.get(at, [])
            if count > len(own):
                places[at] = [*own, *[IDLE] * (count - len(own))]
    if not begins and not (training and trains):
        return tuple(instructions)
    end = ENCODE_BACKWARD if training and trains else RELEASE
    keeps = end == ENCODE_BACKWARD and not again
    found: list[Instruction] = []
    of_medium = Instruction(0, ENCODE, IDLE, IDLE, keeps_graph=False)
    for at, instruction in enumerate(instructions):
        of_medium = of_medium._replace(pass_index=instruction.pass_index)
        for number in begins.get(at, ()):
            found.append(of_medium._replace(medium=number, keeps_graph=keeps))
        found.append(instruction)
        for number in ends.get(at, ()):
            found.append(of_medium._replace(operation=end, medium=number))
    if not begins:
        # Ordinary training runs the encoder and gives it zeros, which optimizers do not skip.
        number = min(range(len(media)), key=lambda n: media[n].tokens, default=IDLE)
        found.append(of_medium._replace(medium=number, keeps_graph=keeps))
        found.append(of_medium._replace(operation=end, medium=number))
    return mark_last_backward(found).instructions
