"""Prompts that several ranks have: found by digests, each run by one rank for all of them.

A *shared prompt* is what the rollouts of a group share before any trained token, where the group
has rollouts on several ranks. The rank that owns it runs it. All ranks meet twice: when the prefix
caches of all shared prompts are there, and when the gradients of these are. Between the two each
runs the rest of its program.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forkpoint.config import AUTO, Config
from forkpoint.plan.program import (
    FORWARD,
    IDLE,
    RETURN,
    SHARE,
    Instruction,
    Program,
    mark_last_backward,
)
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest, IntArray

LEAST_SHARE = 0.02
"""Exchanging is priced where as large a part of all ranks' tokens would not have to run again."""


@dataclass(frozen=True)
class PromptOfBatch:
    """First tokens of rollouts of this rank, before any that is trained."""

    edges: int
    rollouts: tuple[int, ...]
    """Positions in this rank's batch."""


@dataclass(frozen=True)
class SharedPrompt:
    """A prompt that several ranks have; the same on all of them."""

    digest: str
    edges: int
    owner: int
    """Index of the rank that runs it."""
    ranks: tuple[int, ...]
    """Indices of those that have rollouts of it, the owner's among them."""


@dataclass(frozen=True)
class PlannedPrompt:
    """A shared prompt in the plan of one rank that has rollouts of it.

    No token of it is trained. The rank that owns it runs it, and sends its prefix cache to the
    others, whose gradients come back.
    """

    number: int
    """Of all shared prompts of the step, the same on all ranks."""
    edges: int
    rollouts: tuple[int, ...]
    """Positions in this rank's batch."""
    received: bool
    """Whether another rank owns it."""

    def segments(self, forest: Forest) -> list[int]:
        """Its segments in a forest that is cut where it ends, from the root down."""
        path = forest.path(int(forest.leaf[self.rollouts[0]]))
        return [segment for segment in path if forest.start[segment] < self.edges]


# Prompts of a batch, and of all ranks
# ------------------------------------------------------------


def prompts_of(batch: RolloutBatch, runs: IntArray) -> dict[str, PromptOfBatch]:
    """By digest of tokens and media, what rollouts of each group share before any trained token.

    Groups that share the same belong together. Rollouts that do not run are left out.

    runs: int64 [N], how many edges of each run; none run beyond the last trained token.
    """
    found: dict[str, PromptOfBatch] = {}
    mask = np.asarray(batch.loss_mask) != 0
    for number in np.unique(batch.group_index[runs > 0]).tolist():
        rollouts = np.flatnonzero((batch.group_index == number) & (runs > 0))
        tokens = untrained_prefix(batch.token_keys, batch.offsets, mask, rollouts)
        if tokens < 2:
            continue
        begin = int(batch.offsets[rollouts[0]])
        content = batch.content(begin, begin + tokens)
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        others = found[digest].rollouts if digest in found else ()
        found[digest] = PromptOfBatch(tokens - 1, (*others, *rollouts.tolist()))
    return found


def untrained_prefix(
    token_ids: NDArray[np.integer], offsets: IntArray, mask: NDArray[np.bool_], rollouts: IntArray
) -> int:
    """How many first tokens all of these rollouts share before any of them trains on one.

    token_ids (or `RolloutBatch.token_keys`), mask [T] and offsets [N + 1] are those of the batch,
    whose positions `rollouts` has.
    """
    first = int(rollouts[0])
    own = token_ids[offsets[first] : offsets[first + 1]]
    shared = len(own)
    for rollout in rollouts.tolist():
        begin, end = int(offsets[rollout]), int(offsets[rollout + 1])
        shared = min(shared, end - begin)
        here = slice(begin, begin + shared)
        differs = mask[here] | (token_ids[here] != own[:shared])
        shared = int(np.append(differs, True).argmax())
    return shared


def shared_prompts(
    prompts: Sequence[Mapping[str, int]], tokens: Sequence[float]
) -> tuple[SharedPrompt, ...]:
    """Prompts that at least two ranks have, each owned by the rank that has fewest tokens of them.

    All ranks run the prompts that they own before anything else goes on, so these are balanced by
    themselves: the longest first, and of those as long the ones that fewest ranks could run. Of
    ranks with equally many the one owns it that has least to do besides.

    Args:
        prompts: by rank, the edges of each of its prompts, by digest.
        tokens: by rank, of its microbatches, prompts included.
    """
    ranks: dict[str, list[int]] = {}
    edges: dict[str, int] = {}
    for rank, own in enumerate(prompts):
        for digest, length in own.items():
            ranks.setdefault(digest, []).append(rank)
            edges[digest] = length
    shared = [digest for digest, those in ranks.items() if len(those) > 1]
    load = list(tokens)
    for digest in shared:
        for rank in ranks[digest]:
            load[rank] -= edges[digest]
    found = []
    owned = [0] * len(tokens)
    for digest in sorted(shared, key=lambda d: (-edges[d], len(ranks[d]), d)):
        owner = min(ranks[digest], key=lambda rank: (owned[rank], load[rank], rank))
        owned[owner] += edges[digest]
        found.append(SharedPrompt(digest, edges[digest], owner, tuple(ranks[digest])))
    return tuple(found)


def worth_pricing(prompts: Sequence[SharedPrompt], tokens: Sequence[float]) -> bool:
    """Whether enough tokens would not have to run again."""
    spared = sum(prompt.edges * (len(prompt.ranks) - 1) for prompt in prompts)
    return spared > LEAST_SHARE * sum(tokens)


def planned_prompts(
    prompts: Sequence[SharedPrompt], own: Mapping[str, PromptOfBatch], index: int
) -> tuple[PlannedPrompt, ...]:
    """Those of the prompts that this rank has, as its plan takes them."""
    return tuple(
        PlannedPrompt(number, p.edges, own[p.digest].rollouts, received=p.owner != index)
        for number, p in enumerate(prompts)
        if index in p.ranks
    )


def cannot_exchange(config: Config) -> str:
    """The option that keeps a rank from exchanging prompts; empty where none does."""
    if config.sharing == "none":
        return "sharing is 'none'"
    if config.prefix_cache == "host":
        return "prefix_cache is 'host'"
    return "" if config.boundary in (AUTO, "mixed") else f"boundary is {config.boundary!r}"


# Programs that meet
# ------------------------------------------------------------


def exchanging(program: Program, microbatches: Sequence[Microbatch], *, scores: bool) -> Program:
    """The program of a rank that exchanges prompts with others in the step.

    It does not run the microbatch that it receives. All ranks have run the forwards of prompts that
    they send, and nothing else, before the prefix caches are exchanged, and run the backwards of
    these last, once they have the gradients.

    Args:
        program: what `step_program` gave; prompts lie around everything else.
        scores: whether a pass of scores comes first on any rank.
    """
    prompts = {m.index: m.shared_prompt for m in microbatches if m.shared_prompt}
    around = [i for i in program.instructions if prompts.get(i.microbatch) == "sent"]
    inside = [i for i in program.instructions if i.microbatch not in prompts]
    return around_and_inside(Program(tuple(around)), Program(tuple(inside)), scores=scores)


def around_and_inside(around: Program, inside: Program, *, scores: bool) -> Program:
    """The program that runs prompts around its exchanges, and the rest between these.

    Args:
        around: forwards of prompts, then their backwards.
        inside: the rest.
        scores: whether a pass of scores comes first on any rank.
    """
    number = int(scores)
    share = Instruction(number, SHARE, 0, IDLE)
    found: list[Instruction] = []
    if scores:
        unrecorded = share._replace(pass_index=0, keeps_graph=False)
        found += [*around.scores, unrecorded, *inside.scores]
    opening = [i for i in around.training if i.operation == FORWARD]
    closing = [i for i in around.training if i.operation != FORWARD]
    back = share._replace(operation=RETURN)
    training = [*opening, share, *inside.training, back, *closing]
    found += [i._replace(pass_index=number) for i in training]
    return mark_last_backward(found)


def split_at_exchanges(program: Program) -> tuple[Program, Program]:
    """The parts that `around_and_inside` has put together: around the exchanges, and inside."""
    parts: tuple[list[Instruction], list[Instruction]] = [], []
    for instructions in (program.scores, program.training):
        inside = False
        for instruction in instructions:
            if instruction.exchanges:
                inside = instruction.operation == SHARE
            else:
                parts[inside].append(instruction)
    around, rest = (Program(tuple(part)) for part in parts)
    return around, rest
