"""Tokens at which rollouts of a group diverge, and avoidable differences of prompts. Imports no
torch."""

from dataclasses import dataclass

import numpy as np

from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray

LITTLE = 0.95
"""A plan that runs at least this part of the dense tokens saves too little."""
WORTH_MOVING = 32
"""Smallest number of equal tokens after a difference for which moving the difference is
suggested."""
MOVE = "move the difference (a timestamp, an id) behind the equal tokens"


@dataclass(frozen=True)
class GroupParting:
    """First difference between the rollouts of a group."""

    group: str | None
    """Its group_id."""
    rollout: int
    """Position of the group's first rollout in the batch, from 0."""
    rollouts: int
    token: int
    """Position of the first token that differs, from 0: the number of tokens before it, which all
    rollouts of the group share."""
    shortest: int
    """Tokens of the shortest rollout."""
    longest: int
    in_prompt: bool
    """Whether the token lies before the first trained token of a rollout."""


@dataclass(frozen=True)
class Parting:
    """Two prompts that differ and have equal tokens at their ends."""

    grouped: bool
    """Whether they are of one group; else no group has several rollouts."""
    group: str | None
    """The group_id of the second of them."""
    token: int
    """Index of the first token that differs."""
    following: int
    """Number of equal tokens at the ends of both prompts, which cannot be shared because of the
    difference."""

    def __str__(self) -> str:
        of = "prompts of different groups"
        if self.grouped:
            of = f"prompts of {'a group' if self.group is None else f'group {self.group}'}"
        return f"{of} diverge at token {self.token:,}, {self.following:,} equal tokens follow"


@dataclass
class Partings:
    """Summary of where the groups of all batches diverge, with each group of the first batch."""

    groups: int = 0
    in_prompt: int = 0
    """Number of groups that diverge within the prompt."""
    tokens: tuple[int, int] = (0, 0)
    """Smallest and largest `GroupParting.token`."""
    lengths: tuple[int, int] = (0, 0)
    """Lengths of the shortest and of the longest rollout in tokens."""
    of_first: list[GroupParting] | None = None
    """Groups of the first batch."""
    needless: Parting | None = None
    """Prompts with an avoidable difference, of a batch that shares little."""

    def add(self, batch: RolloutBatch, *, little: bool) -> None:
        """Count a batch. `little`: whether its plan saves too little."""
        found = where_groups_part(batch)
        if self.of_first is None:
            self.of_first = found
        if little and self.needless is None:
            self.needless = where_prompts_part(batch)
        for one in found:
            if not self.groups:
                self.tokens, self.lengths = (one.token, one.token), (one.shortest, one.longest)
            self.groups += 1
            self.in_prompt += one.in_prompt
            self.tokens = min(self.tokens[0], one.token), max(self.tokens[1], one.token)
            self.lengths = min(self.lengths[0], one.shortest), max(self.lengths[1], one.longest)

    def __str__(self) -> str:
        """The avoidable difference, else a summary of the groups; empty without either."""
        if self.needless is not None or not self.groups:
            return str(self.needless or "")
        where = {0: "after the prompt", self.groups: "within the prompt"}.get(
            self.in_prompt, f"{self.in_prompt:,} of them within the prompt"
        )
        groups = "1 group" if self.groups == 1 else f"{self.groups:,} groups"
        return (
            f"{groups} at token {_range(self.tokens)}, {where}; "
            f"rollouts of {_range(self.lengths)} tokens"
        )


def where_groups_part(batch: RolloutBatch) -> list[GroupParting]:
    """Find where each group of several rollouts diverges, in the order of the batch."""
    found: list[GroupParting] = []
    starts, ends = batch.offsets[:-1].tolist(), batch.offsets[1:].tolist()
    prompts = batch.prompt_lengths
    for members in batch.groups():
        if len(members) < 2:
            continue
        rows = [slice(starts[n], ends[n]) for n in members.tolist()]
        lengths = [row.stop - row.start for row in rows]
        token = min(lengths)
        first = batch.token_ids[rows[0]]
        for row in rows[1:]:
            token = _equal(first[:token], batch.token_ids[row][:token])
        if token == max(lengths):
            continue  # equal rollouts
        where = int(members[0])
        found.append(
            GroupParting(
                group=batch.group_ids[where],
                rollout=where,
                rollouts=len(members),
                token=token,
                shortest=min(lengths),
                longest=max(lengths),
                in_prompt=token < int(prompts[members].max()),
            )
        )
    return found


def where_prompts_part(batch: RolloutBatch) -> Parting | None:
    """Find the pair of neighbouring prompts of a group that loses the most shared tokens by a
    difference.

    If no group has several rollouts, prompts of the whole batch are compared, because groups that
    are formed by equal prompts split if the prompts differ.

    Returns None if no prompts differ, or if fewer than `WORTH_MOVING` equal tokens follow.
    """
    grouped = len(np.unique(batch.group_index)) < len(batch)
    found: Parting | None = None
    last: dict[int, IntArray] = {}
    begins, prompts = batch.offsets.tolist(), batch.prompt_lengths.tolist()
    for n, group in enumerate(batch.group_index.tolist() if grouped else [0] * len(batch)):
        other = batch.token_ids[begins[n] : begins[n] + prompts[n]]
        one, last[group] = last.get(group, other), other
        least = min(len(one), len(other))
        token = _equal(one[:least], other[:least])
        if token == len(one) == len(other):
            continue
        left = least - token
        following = _equal(one[::-1][:left], other[::-1][:left])
        if following >= WORTH_MOVING and (found is None or following > found.following):
            found = Parting(grouped, batch.group_ids[n], token, following)
    return found


def _range(ends: tuple[int, int]) -> str:
    return " to ".join(f"{end:,}" for end in sorted(set(ends)))


def _equal(one: IntArray, other: IntArray) -> int:
    """Number of equal tokens before the first difference."""
    differs = one != other
    return int(differs.argmax()) if differs.any() else len(one)
