"""A step of several ranks, after their agreement."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from forkpoint.errors import RankError
from forkpoint.parallel.copies import check_same_losses
from forkpoint.parallel.ranks import DataRanks, group_leaders
from forkpoint.parallel.statistics import RouterEnd
from forkpoint.parallel.watch import described
from forkpoint.rollouts.batch import RolloutBatch

T = TypeVar("T")


class Ending(NamedTuple):
    """One rank's part of the exchange at a step's end, or before its first microbatch."""

    error: str | None
    loss: float = 0.0
    digest: str = ""
    router: RouterEnd | None = None
    """Results of routers, if the step computes router statistics."""


@dataclass(eq=False)
class RankStep:
    """Properties of a step on several ranks, and its exchanges.

    By default for this process only, without exchanges.
    """

    ranks: DataRanks = field(default_factory=DataRanks)
    any_trains: bool = False
    """Whether any rank trains on any token."""
    mean: bool = False
    """Whether each rank has a separate loss, whose gradients are reduced as in ordinary training.
    Otherwise the losses of ranks are parts of one loss."""
    digest: str = ""
    """Digest of the common shape of all programs."""
    parts: tuple[RolloutBatch, ...] = ()
    """Rollouts of each rank, if the loss is computed from those of all ranks."""
    router: RouterEnd | None = None
    """Results of routers of all ranks after the step, if it computes router statistics."""

    def same(self, error: Exception | None) -> None:
        """Raise `error`, or RankError if another rank has an error, before the step. Collective."""
        ranks = self.ranks
        own = Ending(None if error is None else described(error), digest=self.digest)
        try:
            found = ranks.exchange(own)
        except RuntimeError:  # of the backend: the others have ended
            if error is not None:
                raise error from None
            raise
        errors = [each.error for each in found]
        ranks.phase = "joined" if errors == [None] * len(errors) else "told"
        if error is not None:
            raise error
        for rank, text in zip(ranks.global_ranks, errors, strict=True):
            if text is not None:
                raise RankError(
                    f"rank {rank} failed before this step, so no rank runs it: {text} Fix it "
                    "there, then repeat the step on all ranks."
                )

    def gather(self, values: Mapping[str, T]) -> list[Mapping[str, T]]:
        """Exchange the values of all ranks within the step. Returns them by index. Collective.

        Raises RankError if another rank has failed instead of sending its values.
        """
        before = self.ranks.phase
        found = self.ranks.exchange(values)
        failed = [n for n, each in enumerate(found) if isinstance(each, tuple)]
        self.ranks.phase = "told" if failed else before
        for n in failed:
            raise _failed(self.ranks.global_ranks[n], str(found[n].error))  # pyright: ignore
        return found

    def finish(
        self,
        loss: Tensor,
        failure: BaseException | None,
        *,
        gradients: bool = True,
        router: Callable[[], RouterEnd] | None = None,
    ) -> Tensor:
        """End the step on all ranks. Returns the loss of all ranks, or of this one with `mean`.

        Collective. `gradients`: whether gradients are applied afterwards. `router`: returns this
        rank's part of `self.router`. Raises `failure`, or RankError if another rank has failed.
        """
        if self.ranks.is_alone:
            assert failure is None, "it was raised at once"
            return loss
        text = None if failure is None else described(failure)
        end = None if router is None else router()
        found = self.ranks.exchange(Ending(text, 0.0 if failure else float(loss), self.digest, end))
        same = len({(e.error, e.digest) for e in found} | {(None, self.digest)}) == 1
        self.ranks.phase = "settled" if same and gradients else "told"
        if failure is not None:
            raise failure
        names = self.ranks.global_ranks
        for rank, each in zip(names, found, strict=True):
            if each.error is not None:
                raise _failed(rank, each.error)
        digests = {each.digest: rank for rank, each in zip(names, found, strict=True)}
        if len(digests) > 1:
            raise RankError(
                f"the ranks ran different schedules ({digests}), so their gradients may be wrong "
                "and none is kept. This is a defect of forkpoint: report it."
            )
        losses = [each.loss for each in found]
        try:
            check_same_losses(losses, names, self.ranks.batches)
        except RankError:  # the same on all ranks
            self.ranks.phase = "told"
            raise
        firsts = group_leaders(self.ranks.batches)
        routers = [end for first in firsts if (end := found[first].router) is not None]
        if routers:
            self.router = reduce(add, routers)
        if self.mean:
            return loss
        return torch.full_like(loss, sum(losses[first] for first in firsts))


def _failed(rank: int, error: str) -> RankError:
    return RankError(
        f"rank {rank} failed in this step, so no rank keeps its gradients: {error} Fix it there, "
        "then repeat the step on all ranks."
    )
