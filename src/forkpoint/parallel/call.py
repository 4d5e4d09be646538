"""One call of several ranks: it ends on all of them, however it ends on one."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from forkpoint.errors import ForkpointError, RankError
from forkpoint.parallel.agreement import Proposal
from forkpoint.parallel.ranks import DataRanks
from forkpoint.parallel.step import Ending, described
from forkpoint.parallel.watch import Watch

T = TypeVar("T")


def run_on_ranks(
    ranks: DataRanks,
    work: Callable[[], T],
    *,
    lockstep: bool,
    succeeded: Callable[[], bool],
) -> T:
    """Call `work` together with the other ranks; if it fails on one, none of them waits for ever.

    Args:
        ranks: those of the call; all of them come here.
        work: the call. If it raises, it has undone its changes.
        lockstep: whether ranks issue collectives in forwards and backwards, unless weights are
            gathered for the step.
        succeeded: whether the call has happened, although it raised.

    Raises what `work` does; and in place of a collective's error RankError, which names the rank
    that has failed or died. A rank that fails before it has joined the others, or within a step
    without collectives, tells them: all raise, and the next call works. One that fails within
    collectives leaves the others in them, and can only say so: `Watch` ends them.
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
        call.leave(error)  # once more, where an interrupt has ended the first
        raise
    finally:
        call.watch.end()


class _Call:
    """Reports of a call that fails, for the other ranks."""

    def __init__(self, ranks: DataRanks, lockstep: bool, succeeded: Callable[[], bool]) -> None:
        self.ranks = ranks
        self.lockstep = lockstep
        self.succeeded = succeeded
        self.watch = Watch(ranks.index, ranks.global_ranks, ranks.calls + 1, ranks.store)
        ranks.watch = self.watch

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks of this one's error, where they come to hear of it."""
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
        """Whether the other ranks come to the step's end, whatever this one does."""
        phase = self.ranks.phase
        return phase == "alone" or (phase == "joined" and not self.lockstep)

    def caused_by(self, error: BaseException) -> str | None:
        """Message in the place of a collective's error; None for any other."""
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
        """Where the others may wait for this rank within collectives, say that it does not come."""
        ranks = self.ranks
        if ranks.phase == "told" or ranks.broken is not None or self.succeeded():
            return
        ranks.broken = described(error)
        try:
            self.watch.failed(ranks.broken, blamed)
        except RuntimeError as other:  # of the store, which has died with its process
            error.add_note(f"forkpoint: the other ranks could not be told: {described(other)}")


def of_backend(error: BaseException) -> bool:
    """Whether a collective has failed, and not what this rank did."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
    )


# Outside of a policy's calls
# ------------------------------------------------------------


def lost_rank(error: BaseException) -> BaseException:
    """The error to raise for one of a collective; other errors are returned as they are."""
    if isinstance(error, ForkpointError) or not of_backend(error):
        return error
    return RankError(
        "a rank has died or ended: look at the output of the other ranks. Start all of them again. "
        f"The collective's error: {described(error)}"
    )


class RankGroup:
    """Ranks whose work outside of a policy's calls fails on all of them or on none."""

    def __init__(self, ranks: DataRanks) -> None:
        self.ranks = ranks

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks. Collective. Raises RankError if one has died or ended."""
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
        """Call `work` on every rank. Collective.

        If it fails on one rank with one of the errors `tells`, that rank raises the error and the
        others RankError, which names the rank.
        """
        value, error = None, None
        try:
            value = work()
        except tells as raised:
            error = raised
        except RuntimeError as raised:
            raise lost_rank(raised) from raised
        found = self.exchange(None if error is None else described(error))
        if error is not None:
            raise error
        for rank, text in zip(self.ranks.global_ranks, found, strict=True):
            if text is not None:
                raise RankError(f"rank {rank} failed, so no rank goes on: {text}")
        return value  # pyright: ignore[reportReturnType]
