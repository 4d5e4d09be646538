"""One step of several ranks, once they have agreed on it."""

from collections.abc import Callable, Mapping
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from forkpoint.errors import RankError
from forkpoint.parallel.copies import check_same_losses
from forkpoint.parallel.ranks import DataRanks, SingleProcess
from forkpoint.parallel.statistics import RouterEnd
from forkpoint.rollouts.batch import RolloutBatch

T = TypeVar("T")


class Ending(NamedTuple):
    """One rank's part of the exchange at a step's end, or before its first microbatch."""

    error: str | None
    loss: float = 0.0
    digest: str = ""
    router: RouterEnd | None = None
    """Where the step takes statistics of routers."""


class SingleProcessStep:
    """The counterpart of `StepOfRanks` in one process: nothing is exchanged."""

    ranks: SingleProcess = SingleProcess()
    mean: bool = False
    parts: tuple[RolloutBatch, ...] = ()
    defers_failures: bool = False
    router: None = None

    def trains(self, own: bool) -> bool:
        return own

    def same(self, error: Exception | None) -> None:
        if error is not None:
            raise error

    def any_rank(self, own: bool) -> bool:
        return own

    def may_be_missed(self, error: Exception) -> None:
        pass

    def finish(
        self,
        loss: Tensor,
        failure: BaseException | None,
        *,
        gradients: bool = True,
        router: Callable[[], RouterEnd] | None = None,
    ) -> Tensor:
        assert failure is None, "it was raised at once"
        return loss


class StepOfRanks:
    """Facts that a step of several ranks needs besides its program, and how it ends."""

    defers_failures: bool = True
    """Whether errors of a loss wait until the program has ended: other ranks run it as well."""

    def __init__(
        self,
        ranks: DataRanks,
        *,
        trains: bool,
        mean: bool,
        lockstep: bool,
        digest: str = "",
        parts: tuple[RolloutBatch, ...] = (),
    ) -> None:
        """
        Args:
            ranks: those of the step.
            trains: whether any rank trains on any token.
            mean: whether each rank's loss is its own, so that gradients are reduced as the wrapper
                reduces those of any other loss; otherwise the ranks' losses are parts of one.
            lockstep: whether ranks wait for one another within the step.
            digest: of the common shape of all programs.
            parts: by rank, its rollouts, where the loss is computed from those of all ranks.
        """
        self.ranks: DataRanks = ranks
        self._trains = trains
        self.mean: bool = mean
        self.lockstep: bool = lockstep
        self.digest: str = digest
        self.parts: tuple[RolloutBatch, ...] = parts
        self.router: RouterEnd | None = None
        """Of all ranks, once the step has ended, where it takes statistics of routers."""
        self._met = False
        """Whether all ranks have run the forwards of the sample."""

    def trains(self, own: bool) -> bool:
        """Whether any rank trains on any token; `own`: whether this one does."""
        return self._trains

    def may_be_missed(self, error: Exception) -> None:
        """The sample has failed here. Unless it did on all ranks, others may wait in collectives
        of its forwards."""
        if not self._met:
            self.ranks.may_be_missed(error)

    def same(self, error: Exception | None) -> None:
        """Raise `error`, or RankError where another rank has one, before the step. Collective."""
        self._before(Ending(None if error is None else described(error), digest=self.digest), error)

    def any_rank(self, own: bool) -> bool:
        """Whether `own` is true on any rank, before the step, once the forwards of the sample have
        run. Collective; raises as `same`."""
        found = any(each["own"] for each in self._before({"own": own}, None))
        self._met = True
        return found

    def _before(self, value: Any, error: Exception | None) -> list[Any]:
        """The values of all ranks. A rank that has failed gives its error, whatever the others
        give."""
        ranks = self.ranks
        try:
            found = ranks.exchange(value)
        except RuntimeError:  # of the backend: the others have ended
            if error is not None:
                raise error from None
            raise
        errors = [each.error if isinstance(each, Ending) else None for each in found]
        ranks.phase = "joined" if errors == [None] * len(errors) else "told"
        if error is not None:
            raise error
        for rank, text in zip(ranks.global_ranks, errors, strict=True):
            if text is not None:
                raise RankError(
                    f"rank {rank} failed before this step, so no rank runs it: {text} The step "
                    "can be repeated on all ranks once that is mended."
                )
        return found

    def gather(self, values: Mapping[str, T]) -> list[Mapping[str, T]]:
        """The values of all ranks, by index, within the step. Collective.

        Raises RankError where another rank has failed in the place of giving its own.
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
        """The loss of all ranks, or of this one with `mean`, once all have come to the end.

        Collective. Without `gradients` no gradient is to be taken afterwards. `router` gives
        this rank's part of what `self.router` is afterwards. Raises `failure`, or RankError where
        another rank has failed.
        """
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
                f"the ranks ran different schedules ({digests}), so their gradients are not to be "
                "trusted and none is kept. This is a defect of forkpoint: report it."
            )
        losses = [each.loss for each in found]
        try:
            check_same_losses(losses, names, self.ranks.batches)
        except RankError:  # the same on all ranks
            self.ranks.phase = "told"
            raise
        firsts = self.ranks.group_leaders
        routers = [end for first in firsts if (end := found[first].router) is not None]
        if routers:
            self.router = reduce(add, routers)
        if self.mean:
            return loss
        return torch.full_like(loss, sum(losses[first] for first in firsts))


RankStep = StepOfRanks | SingleProcessStep


def _failed(rank: int, error: str) -> RankError:
    return RankError(
        f"rank {rank} failed in this step, so no rank keeps its gradients: {error} The step can be "
        "repeated on all ranks once that is mended."
    )


def described(error: BaseException) -> str:
    """An error in one line, for other ranks."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else f"{type(error).__name__}."
