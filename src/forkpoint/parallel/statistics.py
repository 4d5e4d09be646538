"""Statistics of routers over several ranks: what each brings, and what they are together."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from forkpoint.errors import ConfigError, RolloutError


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
    """A digest of the counts given, which are the same on all ranks; "" without."""


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
    shares: Sequence[StatisticsShare | None], names: Sequence[int]
) -> StatisticsOfRanks | None:
    """The statistics of all ranks, by the share of each; None where the step takes none.

    names: by rank, its number in messages.

    Raises ConfigError where ranks were given different counts, and RolloutError where no token of
    any rank counts: the same on all ranks.
    """
    known = [share for share in shares if share is not None]
    if not known:
        return None
    first = known[0]
    for name, share in zip(names, known, strict=True):
        if share.counts != first.counts:
            raise ConfigError(
                f"router_counts of ranks {names[0]} and {name} differ, and the router loss takes "
                "one statistic over the rollouts of all ranks. Give scores.expert_counts, which "
                "are the same on all of them, on every rank."
            )
    tokens = sum(share.tokens for share in known)
    if not first.joins:
        return StatisticsOfRanks(None, sum(share.statistics for share in known), first.gathers)
    if not tokens and any(share.statistics for share in known):
        raise RolloutError(
            "the router loss takes a statistic over the rollouts of all ranks, and none of their "
            "tokens counts: rollouts of one token without their last. Leave the rollouts out, or "
            "use RouterLoss(last_token=True)."
        )
    return StatisticsOfRanks(tokens, 1, first.gathers)


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
