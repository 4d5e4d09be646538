"""Work of ranks outside of a policy's calls, which fails on all of them or on none."""

from collections.abc import Callable
from typing import TypeVar

from forkpoint.errors import ForkpointError, RankError
from forkpoint.parallel.call import of_backend
from forkpoint.parallel.ranks import DataRanks
from forkpoint.parallel.step import described

T = TypeVar("T")


def lost_rank(error: BaseException) -> BaseException:
    """The error to raise for one of a collective; other errors are returned as they are."""
    if isinstance(error, ForkpointError) or not of_backend(error):
        return error
    return RankError(
        "a rank has died or ended: look at the output of the other ranks. Start all of them again. "
        f"The collective's error: {described(error)}"
    )


class RankGroup:
    """The ranks that work together."""

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
