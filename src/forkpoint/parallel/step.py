"""One step of several ranks, once they have agreed on it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from forkpoint.errors import RankError
from forkpoint.parallel.ranks import DataRanks
from forkpoint.parallel.watch import Watch
from forkpoint.rollouts import RolloutBatch


class StepOfRanks:
    """Facts that a step of several ranks needs besides its program, and how it ends."""

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
        self.trains: bool = trains
        self.mean: bool = mean
        self.lockstep: bool = lockstep
        self.digest: str = digest
        self.parts: tuple[RolloutBatch, ...] = parts
        self._told = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it the step runs; a failure becomes one of all ranks.

        Where ranks do not wait for one another within the step they are told at its end, and the
        next step works. Where they do, they are told by the watch and end.
        """
        self.ranks.steps += 1
        watch = Watch(self.ranks.index, self.ranks.global_ranks, self.ranks.steps)
        watch.start()
        try:
            yield
        except BaseException as error:
            if not self._told:
                if self.lockstep:
                    self.ranks.broken = described(error)
                    watch.failed(self.ranks.broken)
                else:
                    self._exchange(described(error), 0.0)
            raise
        finally:
            watch.end()

    def same(self, error: Exception | None) -> None:
        """Raise `error`, or RankError where another rank has one, before the step. Collective."""
        found = self._exchange(None if error is None else described(error), 0.0)
        if error is not None:
            raise error
        for rank, (text, _, _) in zip(self.ranks.global_ranks, found, strict=True):
            if text is not None:
                raise RankError(
                    f"rank {rank} failed before this step, so no rank runs it: {text} The step "
                    "can be repeated on all ranks once that is mended."
                )
        self._told = False

    def settle(self, loss: Tensor, failure: BaseException | None) -> Tensor:
        """The loss of all ranks, or of this one with `mean`, once all have come to the end.

        Collective. Raises `failure`, or RankError where another rank has failed.
        """
        text = None if failure is None else described(failure)
        found = self._exchange(text, 0.0 if failure else float(loss))
        if failure is not None:
            raise failure
        names = self.ranks.global_ranks
        for rank, (error, _, _) in zip(names, found, strict=True):
            if error is not None:
                raise RankError(
                    f"rank {rank} failed in this step, so no rank keeps its gradients: {error} "
                    "The step can be repeated on all ranks once that is mended."
                )
        digests = {digest: rank for rank, (_, _, digest) in zip(names, found, strict=True)}
        if len(digests) > 1:
            raise RankError(
                f"the ranks ran different schedules ({digests}), so their gradients are not to be "
                "trusted and none is kept. This is a defect of forkpoint: report it."
            )
        if self.mean:
            return loss
        return torch.full_like(loss, sum(part for _, part, _ in found))

    def _exchange(self, error: str | None, loss: float) -> list[tuple[str | None, float, str]]:
        self._told = True
        return self.ranks.exchange((error, loss, self.digest))


def described(error: BaseException) -> str:
    """An error in one line, for other ranks."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else f"{type(error).__name__}."
