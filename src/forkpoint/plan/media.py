"""Images and videos of a plan: which microbatches read them, and when encoders run.

An encoder's features are a prefix cache: microbatches read them and leave gradients for them. So
each distinct medium is encoded once, before the first microbatch that reads it, and its encoder's
backward runs once, after the backward of the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forkpoint.plan.program import (
    ENCODE,
    ENCODE_BACKWARD,
    IDLE,
    RELEASE,
    Instruction,
    mark_last_backward,
)
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import Media
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest


@dataclass(frozen=True)
class PlannedMedium:
    """One distinct image or video of a batch."""

    kind: str
    tokens: int
    """How many tokens stand for it."""
    readers: tuple[int, ...]
    """Indices of the microbatches that run some of these, ascending."""
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
    there = (medium >= 0) & (reader >= 0)
    pairs = np.unique(np.stack([medium[there], reader[there]], axis=1), axis=0)
    readers: list[list[int]] = [[] for _ in batch.media]
    for number, index in pairs.tolist():
        readers[number].append(index)
    return tuple(
        PlannedMedium(medium.kind, medium.tokens, tuple(indices), _frames(medium))
        for medium, indices in zip(batch.media, readers, strict=True)
    )


def _frames(medium: Media) -> int:
    """By its grid [1, 3] of patches in time, height and width; 1 without one."""
    grids = [value for name, value in medium.inputs.items() if name.endswith("_grid_thw")]
    return max(1, int(grids[0][0][0])) if grids else 1


def with_encoders(
    instructions: Sequence[Instruction],
    media: Sequence[PlannedMedium],
    *,
    training: bool,
    trains: bool,
    again: bool = False,
) -> tuple[Instruction, ...]:
    """The instructions of one pass, with those of encoders.

    Args:
        instructions: as a program has them.
        media: those of the plan.
        training: whether it is the pass of backwards, which may have none.
        trains: whether the encoder has parameters that are trained.
        again: whether its backward runs it once more, so that no activations are kept.
    """
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
        number = min(range(len(media)), key=lambda number: media[number].tokens)
        found.append(of_medium._replace(medium=number, keeps_graph=keeps))
        found.append(of_medium._replace(operation=end, medium=number))
    return mark_last_backward(found).instructions
