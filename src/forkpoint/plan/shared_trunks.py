"""Trunks that ranks have in common: found by digests, each given to one rank to compute."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forkpoint.plan.trunks import Trunk, untrained_prefix
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray

LEAST_SHARE = 0.02
"""Trunks are priced where as large a part of all ranks' tokens would not have to run again."""


@dataclass(frozen=True)
class OwnTrunk:
    """First tokens of rollouts of this rank, before any that is trained."""

    edges: int
    rollouts: tuple[int, ...]
    """Positions in this rank's batch."""


@dataclass(frozen=True)
class SharedTrunk:
    """A trunk that several ranks have; the same on all of them."""

    digest: str
    edges: int
    owner: int
    """Index of the rank that runs it."""
    ranks: tuple[int, ...]
    """Indices of those that have rollouts of it, the owner's among them."""


def trunks_of(batch: RolloutBatch, runs: IntArray) -> dict[str, OwnTrunk]:
    """By digest of its tokens, what the rollouts of each group share before any trained token.

    Groups that share the same belong together. Rollouts that do not run are left out.

    Args:
        batch: the rollouts.
        runs: int64 [N], how many edges of each run; none run beyond the last trained token.
    """
    found: dict[str, OwnTrunk] = {}
    mask = np.asarray(batch.loss_mask) != 0
    for number in np.unique(batch.group_index[runs > 0]).tolist():
        rollouts = np.flatnonzero((batch.group_index == number) & (runs > 0))
        tokens = untrained_prefix(batch.token_ids, batch.offsets, mask, rollouts)
        if tokens < 2:
            continue
        begin = int(batch.offsets[rollouts[0]])
        content = np.ascontiguousarray(batch.token_ids[begin : begin + tokens], np.int64)
        digest = hashlib.blake2b(content.tobytes(), digest_size=16).hexdigest()
        others = found[digest].rollouts if digest in found else ()
        found[digest] = OwnTrunk(tokens - 1, (*others, *rollouts.tolist()))
    return found


def shared_trunks(
    trunks: Sequence[Mapping[str, int]], tokens: Sequence[float]
) -> tuple[SharedTrunk, ...]:
    """Trunks that at least two ranks have, each owned by the rank that has fewest tokens of them.

    All ranks run the trunks that they own before anything else goes on, so these are balanced by
    themselves: the longest first, and of those as long the ones that fewest ranks could run. Of
    ranks with equally many the one owns it that has least to do besides.

    Args:
        trunks: by rank, the edges of each of its trunks, by digest.
        tokens: by rank, of its microbatches, trunks included.
    """
    ranks: dict[str, list[int]] = {}
    edges: dict[str, int] = {}
    for rank, own in enumerate(trunks):
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
        found.append(SharedTrunk(digest, edges[digest], owner, tuple(ranks[digest])))
    return tuple(found)


def worth_pricing(trunks: Sequence[SharedTrunk], tokens: Sequence[float]) -> bool:
    """Whether enough tokens would not have to run again."""
    spared = sum(trunk.edges * (len(trunk.ranks) - 1) for trunk in trunks)
    return spared > LEAST_SHARE * sum(tokens)


def own_of(
    trunks: Sequence[SharedTrunk], own: Mapping[str, OwnTrunk], index: int
) -> tuple[Trunk, ...]:
    """Those of the trunks that this rank has, as its plan takes them."""
    return tuple(
        Trunk(number, trunk.edges, own[trunk.digest].rollouts, received=trunk.owner != index)
        for number, trunk in enumerate(trunks)
        if index in trunk.ranks
    )
