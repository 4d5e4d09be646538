"""Statistics of routers over several ranks: each rank's part, and the total."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.parallel.copies import check_copies
from forkpoint.parallel.ranks import group_leaders


@dataclass(frozen=True)
class StatisticsShare:
    """One rank's part of a step's router statistics."""

    joins: bool
    """Whether one statistic is taken over the rollouts of all ranks."""
    gathers: bool
    """Whether counts are summed over ranks within the step, after a pass of scores."""
    tokens: int
    """Number of this rank's tokens that count."""
    statistics: int
    """Number of this rank's statistics."""
    counts: str
    """Digest of the caller's router_counts; "" without. They must be equal on all ranks if one
    statistic is taken over all ranks."""
    parts: str
    """Digest of the assignment of rollouts to statistics."""


@dataclass(frozen=True)
class StatisticsOfRanks:
    """Totals of the statistics of all ranks."""

    tokens: int | None
    """Number of tokens of a single statistic over all ranks; None if ranks have separate
    statistics."""
    statistics: int
    """Number of statistics whose mean is the loss."""
    gathers: bool


def joined(
    shares: Sequence[StatisticsShare | None],
    names: Sequence[int],
    batches: Sequence[int] | None = None,
) -> StatisticsOfRanks | None:
    """Combine the statistics of all ranks; None if the step computes none.

    Args:
        shares: by rank.
        names: by rank, its number in messages.
        batches: number of the batch, by rank. Ranks with one batch count once. None: all differ.

    Raises ConfigError if ranks have different counts, or ranks with one batch different scopes, and
    RolloutError if no token counts. All ranks raise the same error.
    """
    known = [share for share in shares if share is not None]
    if not known:
        return None
    first = known[0]
    if batches is not None:
        check_copies(known, names, batches, _difference, ConfigError)
    for name, share in zip(names, known, strict=True):
        if first.joins and share.counts != first.counts:
            raise ConfigError(
                f"router_counts of ranks {names[0]} and {name} differ, and the router loss takes "
                "one statistic over the rollouts of all ranks. Give scores.expert_counts, which "
                "are the same on all of them, on every rank."
            )
    if batches is not None:
        known = [known[rank] for rank in group_leaders(batches)]
    tokens = sum(share.tokens for share in known)
    if not first.joins:
        return StatisticsOfRanks(None, sum(share.statistics for share in known), first.gathers)
    if not tokens and any(share.statistics for share in known):
        raise RolloutError(
            "the router loss takes a statistic over the rollouts of all ranks, and each has one "
            "token, which last_token=False does not count. Leave the rollouts out, or use "
            "RouterLoss(last_token=True)."
        )
    return StatisticsOfRanks(tokens, 1, first.gathers)


def _difference(one: StatisticsShare, other: StatisticsShare) -> str | None:
    """Describe how the statistics of ranks with one batch differ; None if they agree."""
    for what, same in (
        ("lists of rollouts as the scope of the router loss", one.parts == other.parts),
        ("router_counts", one.counts == other.counts),
    ):
        if not same:
            return f"were given different {what}. Give both the same."
    return None


@dataclass(frozen=True, eq=False)
class RouterEnd:
    """Results of routers at the end of a step, of one rank or of all ranks."""

    loss: float
    logical_LE: Tensor
    """int64 [L, E], on the CPU."""
    computed_LE: Tensor
    """int64 [L, E], on the CPU."""

    def __add__(self, other: "RouterEnd") -> "RouterEnd":
        return RouterEnd(
            self.loss + other.loss,
            self.logical_LE + other.logical_LE,
            self.computed_LE + other.computed_LE,
        )
