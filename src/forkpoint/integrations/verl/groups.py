"""Whether the rollouts of a prompt stay together on their way to a mini-batch of one rank."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forkpoint.parallel.agreement import group_digests
from forkpoint.plan import Plan
from forkpoint.rollouts.batch import RolloutBatch

_log = logging.getLogger("forkpoint")

LEAST_SAVED = 0.1
"""Of a mini-batch's tokens; a run that saves less is told so."""
NOTICED = 0.05
"""Of the tokens that run; what scattered groups cost more than this is told."""
LOOKED_AT = 8
"""Mini-batches that are looked at before a run is taken to be well."""


@dataclass(frozen=True, eq=False)
class RankGroups:
    """One rank's prompts of a mini-batch, of which there are G.

    digests: uint64 [G], the same wherever a prompt's rollouts are.
    rollouts, prompt_tokens: int64 [G].
    given_tokens, computed_tokens: of the rank's mini-batch, without those that give no gradient;
        run by its plan.
    exchanged: whether ranks send one another the prompts that several of them have.
    """

    digests: NDArray[np.uint64]
    rollouts: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    given_tokens: int
    computed_tokens: int
    exchanged: bool = False

    @classmethod
    def of(cls, batch: RolloutBatch, plan: Plan) -> "RankGroups":
        """The prompts of a batch, the tokens before the first trained one of each rollout."""
        _, firsts, counts = np.unique(batch.group_index, return_index=True, return_counts=True)
        prompts = np.zeros(len(firsts), np.int64)
        for number, first in enumerate(firsts):
            begin, end = batch.offsets[first], batch.offsets[first + 1]
            trained = np.flatnonzero(batch.loss_mask[begin:end])
            prompts[number] = trained[0] if len(trained) else end - begin
        digests = group_digests(batch)
        given, exchanged = plan.logical_tokens - plan.left_out.tokens, plan.split == "exchange"
        counts = counts.astype(np.int64)
        return cls(digests, counts, prompts, given, plan.computed_tokens, exchanged)


class GroupWatch:
    """Looks at the first mini-batches of an engine and says once what they share, if it is little.

    Every rank calls it with the same exchange, at the same calls.
    """

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        """Rollouts of each prompt in the last pass that scored whole batches."""
        self._scoring = False
        self._left = LOOKED_AT

    @property
    def looks(self) -> bool:
        """Whether it has not come to an end: the same on all ranks."""
        return self._left > 0

    def scored(self, ranks: list[RankGroups]) -> None:
        """Take note of a pass of scores over the prompts of all ranks."""
        if not self._scoring:
            self._known = {}
        self._scoring = True
        for digest, count in _totals(ranks).items():
            self._known[digest] = max(self._known.get(digest, 0), count)

    def trained(self, ranks: list[RankGroups], say: Callable[[str], None] | None) -> None:
        """Look at a mini-batch of all ranks; `say` is None on ranks that keep silent."""
        self._scoring = False
        if not self.looks:
            return
        self._left -= 1
        message = sharing_message(ranks, self._known)
        if message is not None:
            self._left = 0
            if say is not None:
                say(message)


def sharing_message(ranks: list[RankGroups], known: dict[int, int]) -> str | None:
    """The text for a mini-batch that shares little, None for one that does not.

    known: rollouts of each prompt, over all mini-batches, where that is known.
    """
    totals = _totals(ranks)
    lengths = {
        int(d): int(n) for r in ranks for d, n in zip(r.digests, r.prompt_tokens, strict=True)
    }
    places: dict[int, int] = {}
    for rank in ranks:
        for digest in rank.digests.tolist():
            places[digest] = places.get(digest, 0) + 1
    # Prompts that are exchanged run on one rank, wherever their rollouts are.
    alone = not any(rank.exchanged for rank in ranks)
    spread = [d for d, n in places.items() if n > 1 and alone]
    again = sum((places[d] - 1) * lengths[d] for d in spread)
    split = [d for d, count in totals.items() if known.get(d, 0) > count]
    again += int(sum(lengths[d] * (1 - totals[d] / known[d]) for d in split))
    given = sum(rank.given_tokens for rank in ranks)
    computed = sum(rank.computed_tokens for rank in ranks)
    share = f"{computed:,} of its {given:,} tokens run ({computed / given:.0%})" if given else ""
    if given and again > NOTICED * computed:
        reasons = []
        if spread:
            reasons.append(
                f"{len(spread)} of {len(totals)} prompts have rollouts on several ranks: set "
                "VERL_USE_EXTERNAL_MODULES=forkpoint.integrations.verl.trainers and "
                "trainer.v1.trainer_mode=forkpoint_sync, or trainer.use_v1=false and "
                "actor_rollout_ref.actor.use_prefix_grouper=true (prompts of a batch a multiple of "
                "the ranks)"
            )
        if split:
            reasons.append(
                f"{len(split)} of {len(totals)} have rollouts in other mini-batches: set "
                "actor_rollout_ref.actor.shuffle=false (critic.shuffle=false), and keep groups as "
                "above"
            )
        return (
            f"a mini-batch shares less than it could: {share}, and {again:,} of these would not if "
            f"the rollouts of each prompt were together. {'; '.join(reasons)}. docs/verl.md says "
            "more."
        )
    # The last token of a rollout is run by nobody.
    dense = given - sum(totals.values())
    if given and computed > (1 - LEAST_SAVED) * dense:
        return (
            f"a mini-batch shares little: {share}, with the rollouts of each prompt together. "
            "Prompts are short beside responses, or actor_rollout_ref.rollout.n is small, or "
            '[config] sharing is "none"; sharing gains little then.'
        )
    return None


def _totals(ranks: list[RankGroups]) -> dict[int, int]:
    """Rollouts of each prompt on all ranks."""
    found: dict[int, int] = {}
    for rank in ranks:
        for digest, count in zip(rank.digests.tolist(), rank.rollouts.tolist(), strict=True):
            found[digest] = found.get(digest, 0) + count
    return found


def warn(message: str) -> None:
    """Say it on the logger `forkpoint`."""
    _log.warning("%s", message)
