"""Where prompts of a group part, for batches in which little is shared. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray

LITTLE = 0.95
"""A plan that runs at least this part of its dense tokens shares nothing that is worth it."""
WORTH_MOVING = 32
"""Equal tokens after the first difference from which on it is worth moving the difference."""
MOVE = "move what differs (a timestamp, an id) behind the equal tokens"


@dataclass(frozen=True)
class Parting:
    """Two prompts that differ and have equal tokens at their ends."""

    grouped: bool
    """Whether they are of one group; else no group has several rollouts."""
    token: int
    """Index of the first token that differs."""
    following: int
    """Equal tokens at the ends of both prompts, which the difference keeps from being shared."""

    def __str__(self) -> str:
        of = "prompts of a group" if self.grouped else "prompts of different groups"
        return f"{of} part at token {self.token:,}, {self.following:,} equal tokens follow"


def where_prompts_part(batch: RolloutBatch) -> Parting | None:
    """The pair of prompts that lose most by a difference, of those next to each other in a group.

    Where no group has several rollouts, those of the whole batch are compared: a group that is told
    by its prompt falls apart when prompts differ.

    Returns None where no prompts differ, and for different groups unless `WORTH_MOVING` tokens
    follow.
    """
    grouped = len(np.unique(batch.group_index)) < len(batch)
    found: Parting | None = None
    for one, other in _neighbours(batch, grouped):
        least = min(len(one), len(other))
        token = _equal(one[:least], other[:least])
        if token == len(one) == len(other):
            continue
        left = least - token
        following = _equal(one[::-1][:left], other[::-1][:left])
        if found is None or following > found.following:
            found = Parting(grouped, token, following)
    if found is not None and not grouped and found.following < WORTH_MOVING:
        return None
    return found


def _neighbours(batch: RolloutBatch, grouped: bool) -> Iterator[tuple[IntArray, IntArray]]:
    """Pairs of prompts in the order of the batch: the tokens before the first trained one."""
    last: dict[int, IntArray] = {}
    offsets = batch.offsets.tolist()
    for n, group in enumerate(batch.group_index.tolist() if grouped else [0] * len(batch)):
        rows = slice(offsets[n], offsets[n + 1])
        ids, mask = batch.token_ids[rows], batch.loss_mask[rows]
        prompt = ids[: int(mask.argmax()) if mask.any() else len(ids)]
        if group in last:
            yield last[group], prompt
        last[group] = prompt


def _equal(one: IntArray, other: IntArray) -> int:
    """How many tokens are equal before the first that differs."""
    differs = one != other
    return int(differs.argmax()) if differs.any() else len(one)
