"""Statistics of routers over several ranks: what each brings, and what they are together."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.parallel.copies import check_copies
from forkpoint.parallel.ranks import group_leaders


@dataclass(frozen=True)
class StatisticsShare:
    """One rank's part of a step's statistics of routers."""

    joins: bool
    """Whether one statistic is taken over the rollouts of all ranks."""
    gathers: bool
    """Whether its counts are added up over ranks within the step, after a pass of scores."""
    tokens: int
    """Tokens of this rank that count."""
    statistics: int
    """Statistics of this rank's own."""
    counts: str
    """A digest of the counts given; "" without. Of one statistic over all ranks they are the same
    on all of them."""
    parts: str
    """A digest of the statistic that each rollout is part of."""


@dataclass(frozen=True)
class StatisticsOfRanks:
    """Statistics of all ranks' rollouts."""

    tokens: int | None
    """Tokens of the one statistic over all ranks; None where each rank has statistics of its
    own."""
    statistics: int
    """Statistics that the loss is the mean of."""
    gathers: bool


def joined(
    shares: Sequence[StatisticsShare | None],
    names: Sequence[int],
    batches: Sequence[int] | None = None,
) -> StatisticsOfRanks | None:
    """The statistics of all ranks, by the share of each; None where the step takes none.

    Args:
        shares: by rank.
        names: by rank, its number in messages.
        batches: by rank, which batch it has; ranks of one are counted once. None: each its own.

    Raises ConfigError where ranks were given different counts or ranks with one batch different
    scopes, and RolloutError where no token of any rank counts: the same on all ranks.
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
    """How the statistics of ranks with one batch differ."""
    for what, same in (
        ("lists of rollouts as the scope of the router loss", one.parts == other.parts),
        ("router_counts", one.counts == other.counts),
    ):
        if not same:
            return f"were given different {what}. Give both the same."
    return None


@dataclass(frozen=True, eq=False)
class RouterEnd:
    """Results of routers at the end of a step, of one rank or of all."""

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
