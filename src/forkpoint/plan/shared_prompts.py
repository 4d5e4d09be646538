"""Prompts of several ranks, found by digests. One rank runs each of them for all.

A *shared prompt* is the tokens that the rollouts of a group share before any trained token, if
several ranks have rollouts of the group. The rank that owns the prompt runs it. All ranks exchange
data twice: prefix caches after the forwards of all shared prompts, and gradients before their
backwards. In between each rank runs the rest of its program.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forkpoint.config import AUTO, Config
from forkpoint.plan.program import (
    FORWARD,
    IDLE,
    RETURN,
    SHARE,
    Instruction,
    Program,
)
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest, IntArray

LEAST_SHARE = 0.02
"""Smallest part of all ranks' tokens that an exchange must save to be priced."""


@dataclass(frozen=True)
class PromptOfBatch:
    """First tokens that rollouts of this rank share, before any trained token."""

    edges: int
    rollouts: tuple[int, ...]
    """Positions in this rank's batch."""


@dataclass(frozen=True)
class SharedPrompt:
    """A prompt of several ranks. All ranks have equal values."""

    digest: str
    edges: int
    owner: int
    """Index of the rank that runs it."""
    ranks: tuple[int, ...]
    """Indices of the ranks with rollouts of it, including the owner."""


@dataclass(frozen=True)
class PlannedPrompt:
    """A shared prompt in the plan of one rank that has rollouts of it.

    No token of it is trained. The rank that owns it runs it, and sends its prefix cache to the
    others, which return gradients.
    """

    number: int
    """Index among all shared prompts of the step, equal on all ranks."""
    edges: int
    rollouts: tuple[int, ...]
    """Positions in this rank's batch."""
    received: bool
    """Whether another rank owns it."""

    def segments(self, forest: Forest) -> list[int]:
        """Its segments from the root down, in a forest that is cut at its end."""
        path = forest.path(int(forest.leaf[self.rollouts[0]]))
        return [segment for segment in path if forest.start[segment] < self.edges]


# Prompts of a batch, and of all ranks
# ------------------------------------------------------------


def prompts_of(batch: RolloutBatch, runs: IntArray) -> dict[str, PromptOfBatch]:
    """Tokens that rollouts of each group share before any trained token, by digest of tokens and
    media.

    Groups with equal shared tokens have one entry. Rollouts that do not run are left out.

    runs: int64 [N], number of edges of each rollout that run, none beyond the last trained token.
    """
    found: dict[str, PromptOfBatch] = {}
    keys, mask = batch.token_keys, np.asarray(batch.loss_mask) != 0
    for number in np.unique(batch.group_index[runs > 0]).tolist():
        rollouts = np.flatnonzero((batch.group_index == number) & (runs > 0))
        begins, tokens = batch.offsets[rollouts].tolist(), int(batch.lengths[rollouts].min())
        for begin in begins:
            here, first = slice(begin, begin + tokens), slice(begins[0], begins[0] + tokens)
            differs = mask[here] | (keys[here] != keys[first])
            tokens = int(np.append(differs, True).argmax())
        if tokens < 2:
            continue
        content = batch.content(begins[0], begins[0] + tokens)
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        others = found[digest].rollouts if digest in found else ()
        found[digest] = PromptOfBatch(tokens - 1, (*others, *rollouts.tolist()))
    return found


def shared_prompts(
    prompts: Sequence[Mapping[str, int]], tokens: Sequence[float]
) -> tuple[SharedPrompt, ...]:
    """Prompts that at least two ranks have, with owners.

    Ranks run the prompts that they own before other work, so these are balanced separately. Prompts
    are assigned longest first; of equal length, those of the fewest ranks first. The owner is the
    rank with the fewest owned tokens; of these, the one with the fewest other tokens.

    Args:
        prompts: by rank, the edges of each of its prompts, by digest.
        tokens: by rank, number of tokens of its microbatches, with prompts.
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
    """Whether an exchange saves enough tokens to be priced."""
    spared = sum(prompt.edges * (len(prompt.ranks) - 1) for prompt in prompts)
    return spared > LEAST_SHARE * sum(tokens)


def planned_prompts(
    prompts: Sequence[SharedPrompt], own: Mapping[str, PromptOfBatch], index: int
) -> tuple[PlannedPrompt, ...]:
    """The prompts of this rank, for its plan."""
    return tuple(
        PlannedPrompt(number, p.edges, own[p.digest].rollouts, received=p.owner != index)
        for number, p in enumerate(prompts)
        if index in p.ranks
    )


def cannot_exchange(config: Config) -> str:
    """Option that prevents an exchange of prompts, with its value; empty if none does."""
    if config.sharing == "none":
        return "sharing is 'none'"
    if config.prefix_cache == "host":
        return "prefix_cache is 'host'"
    return "" if config.boundary in (AUTO, "mixed") else f"boundary is {config.boundary!r}"


# Programs that meet
# ------------------------------------------------------------


def exchanging(program: Program, microbatches: Sequence[Microbatch], *, scores: bool) -> Program:
    """The program of a rank that exchanges prompts with others in the step.

    It does not run the microbatch that it receives. Before the exchange of prefix caches, ranks run
    only the forwards of the prompts that they send. They run the backwards of these prompts last,
    after they have received the gradients.

    Args:
        program: the result of `step_program`, with prompts around all other microbatches.
        scores: whether a pass of scores comes first on any rank.
    """
    prompts = {m.index: m.shared_prompt for m in microbatches if m.shared_prompt}
    around = [i for i in program.instructions if prompts.get(i.microbatch) == "sent"]
    inside = [i for i in program.instructions if i.microbatch not in prompts]
    return around_and_inside(Program(tuple(around)), Program(tuple(inside)), scores=scores)


def around_and_inside(around: Program, inside: Program, *, scores: bool) -> Program:
    """Program with prompts before and after its exchanges, and other work between them.

    Args:
        around: forwards of prompts, then their backwards.
        inside: all other work.
        scores: whether a pass of scores comes first on any rank.
    """
    share = Instruction(SHARE, 0, IDLE)
    found: list[Instruction] = []
    if scores:
        found += [*around.scores, share._replace(keeps_graph=False), *inside.scores]
    opening = [i for i in around.training if i.operation == FORWARD]
    closing = [i for i in around.training if i.operation != FORWARD]
    back = share._replace(operation=RETURN)
    return Program((*found, *opening, share, *inside.training, back, *closing))


def split_at_exchanges(program: Program) -> tuple[Program, Program]:
    """Inverse of `around_and_inside`: the parts around the exchanges, and inside."""
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
