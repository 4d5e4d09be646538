"""Ranks that replay together: what one of them does for all, and errors that all of them raise."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from forkpoint.errors import ForkpointError, RankError
from forkpoint.parallel.call import of_backend
from forkpoint.parallel.ranks import DataRanks
from forkpoint.parallel.step import described

T = TypeVar("T")


def gone(error: BaseException) -> BaseException:
    """The error to raise in the place of a collective's; any other as it is."""
    if isinstance(error, ForkpointError) or not of_backend(error):
        return error
    return RankError(
        "a rank of this replay has died or ended, so that it cannot go on here: look at what the "
        "other ranks have said. Start all of them again, with --resume where there is a folder. "
        f"The collective's error: {described(error)}"
    )


class Team:
    """The ranks of a replay. The first of them writes its folder."""

    def __init__(self, ranks: DataRanks) -> None:
        self.ranks = ranks
        self.index: int = ranks.index
        self.size: int = ranks.size
        self.group: dist.ProcessGroup = ranks.cpu_group

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks. Collective. Raises RankError where one has died or ended."""
        try:
            return self.ranks.exchange(value)
        except RuntimeError as error:
            raise gone(error) from error

    def each(self, work: Callable[[], T]) -> T:
        """Do work on every rank. Collective.

        Where one has an error all raise: it its own, the others RankError, which names it.
        """
        value, error = None, None
        try:
            value = work()
        except (ForkpointError, OSError) as found:
            error = found
        self._agree(error)
        return value  # pyright: ignore[reportReturnType]

    def first(self, work: Callable[[], T]) -> T:
        """Do work on the first rank; its value, or its error, on all of them. Collective."""
        value, error = None, None
        if self.index == 0:
            try:
                value = work()
            except (ForkpointError, OSError) as found:
                error = found
        self._agree(error)
        return self.exchange(value)[0]  # pyright: ignore[reportReturnType]

    def _agree(self, error: Exception | None) -> None:
        found = self.exchange(None if error is None else described(error))
        if error is not None:
            raise error
        for rank, text in zip(self.ranks.global_ranks, found, strict=True):
            if text is not None:
                raise RankError(f"rank {rank} cannot go on with the replay: {text}")
