"""A call of several ranks, which ends on all ranks even if one of them fails."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from forkpoint.errors import ForkpointError, RankError
from forkpoint.parallel.agreement import Proposal
from forkpoint.parallel.ranks import DataRanks
from forkpoint.parallel.step import Ending
from forkpoint.parallel.watch import Watch, described

T = TypeVar("T")


def run_on_ranks(
    ranks: DataRanks,
    work: Callable[[], T],
    *,
    lockstep: bool,
    succeeded: Callable[[], bool],
) -> T:
    """Call `work` together with the other ranks. If it fails on one rank, no other rank waits
    forever.

    Args:
        ranks: ranks of the call. All of them must call this.
        work: the call. It must undo its changes if it raises.
        lockstep: whether ranks issue collectives in forwards and backwards, unless weights are
            gathered once a step.
        succeeded: returns whether the call has succeeded, although it raised.

    Raises the error of `work`. An error of a collective becomes RankError, which names the rank
    that has failed or died. A rank that fails before the agreement, or in a step without
    collectives, tells the other ranks. Then all raise, and the next call works. If a rank fails
    between collectives, the others wait in them and cannot be woken, so `Watch` ends their
    processes.
    """
    ranks.phase = "apart"
    call = _Call(ranks, lockstep, succeeded)
    try:
        try:
            call.watch.start()
            return work()
        except BaseException as error:
            call.tell(error)
            cause = call.caused_by(error)
            if cause is None:
                raise
            raise RankError(cause) from error
    except BaseException as error:
        call.leave(error)  # again, if an interrupt has ended the first
        raise
    finally:
        call.watch.end()


class _Call:
    """Reports the failure of a call to the other ranks."""

    def __init__(self, ranks: DataRanks, lockstep: bool, succeeded: Callable[[], bool]) -> None:
        self.ranks = ranks
        self.lockstep = lockstep
        self.succeeded = succeeded
        self.watch = Watch(ranks.index, ranks.global_ranks, ranks.calls + 1, ranks.store)
        ranks.watch = self.watch

    def tell(self, error: BaseException) -> None:
        """Send this rank's error to the other ranks, if they come to an exchange."""
        ranks = self.ranks
        if ranks.broken is not None or self.succeeded():
            return
        text = described(error)
        try:
            if ranks.phase == "apart":
                ranks.exchange(Proposal("", error=text))
                ranks.phase = "told"
            elif self._comes_to_the_end() and not of_backend(error):
                ranks.exchange(Ending(text))
                ranks.phase = "told"
        except RuntimeError as other:  # of the backend: a rank is gone
            error.add_note(f"forkpoint: the other ranks could not be told: {described(other)}")

    def _comes_to_the_end(self) -> bool:
        """Whether the other ranks reach the step's end without this rank."""
        phase = self.ranks.phase
        return phase == "alone" or (phase == "joined" and not self.lockstep)

    def caused_by(self, error: BaseException) -> str | None:
        """Message that replaces a collective's error; None for other errors."""
        ranks = self.ranks
        if ranks.phase == "told" or ranks.broken is not None or not of_backend(error):
            return None
        blamed = self.watch.blamed()
        self.leave(error, blamed)
        return (
            f"a collective of this step has failed on {ranks.name}, because of "
            f"{blamed or 'a rank that is not known'}. No gradient of the step is kept here, and "
            "the ranks cannot go on. Start all processes again, from the last checkpoint. The "
            f"collective's error: {described(error)}"
        )

    def leave(self, error: BaseException, blamed: str | None = None) -> None:
        """Tell ranks that may wait in collectives that this rank has failed."""
        ranks = self.ranks
        if ranks.phase == "told" or ranks.broken is not None or self.succeeded():
            return
        ranks.broken = described(error)
        try:
            self.watch.failed(ranks.broken, blamed)
        except RuntimeError as other:  # of the store, which has died with its process
            error.add_note(f"forkpoint: the other ranks could not be told: {described(other)}")


def of_backend(error: BaseException) -> bool:
    """Whether an error was raised by a collective."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
    )


# Outside of a policy's calls
# ------------------------------------------------------------


def lost_rank(error: BaseException) -> BaseException:
    """Convert an error of a collective to RankError. Other errors are returned unchanged."""
    if isinstance(error, ForkpointError) or not of_backend(error):
        return error
    return RankError(
        "a rank has died or ended: look at the output of the other ranks. Start all of them again. "
        f"The collective's error: {described(error)}"
    )


class RankGroup:
    """Runs work of several ranks outside of a policy's calls. It fails on all ranks or on none."""

    def __init__(self, ranks: DataRanks) -> None:
        self.ranks = ranks
        self._told = False
        """Whether all ranks know of a failure of one of them."""

    def exchange(self, value: T) -> list[T]:
        """Exchange the values of all ranks. Collective. Raises RankError if a rank has died or
        ended."""
        try:
            found = self.ranks.exchange(value)
        except RuntimeError as error:
            raise lost_rank(error) from error
        self.ranks.phase = "told"  # no call of a policy is running
        return found

    def first(self, work: Callable[[], T]) -> T:
        """Call `work` on the first rank, and return its value on all of them. Collective."""
        value = self.each(work if self.ranks.index == 0 else lambda: None)
        return self.exchange(value)[0]  # pyright: ignore[reportReturnType]

    def each(
        self,
        work: Callable[[], T],
        *,
        tells: tuple[type[Exception], ...] = (ForkpointError, OSError),
    ) -> T:
        """Call `work` on every rank, which may call `gather` once. Collective.

        If it fails on one rank with an error of a class in `tells`, that rank raises it, and the
        others raise RankError, which names the rank.
        """
        value, error = None, None
        self._told = False
        try:
            value = work()
        except tells as raised:
            if self._told:
                raise
            error = raised
        except RuntimeError as raised:
            raise lost_rank(raised) from raised
        try:
            self._gather(error if error is None else described(error))
        except RankError:
            if error is None:
                raise
        if error is not None:
            raise error
        return value  # pyright: ignore[reportReturnType]

    def gather(self, value: T) -> list[T]:
        """Collect the values of all ranks, in the `work` of `each`. Raises RankError if `work` has
        failed on another rank."""
        return [each for (each,) in self._gather((value,))]

    def _gather(self, value: Any) -> list[Any]:
        """Exchange values, or the texts of errors."""
        found = self.exchange(value)
        for rank, each in zip(self.ranks.global_ranks, found, strict=True):
            if isinstance(each, str):
                self._told = True
                raise RankError(f"rank {rank} failed, so no rank goes on: {each}")
        return found
