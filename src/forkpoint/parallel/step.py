"""One step of several ranks, once they have agreed on it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from forkpoint.errors import RankError
from forkpoint.parallel.ranks import DataRanks


@dataclass(frozen=True, eq=False)
class StepOfRanks:
    """What a step of several ranks has to know besides its program."""

    ranks: DataRanks
    trains: bool
    """Whether any rank trains on any token."""
    mean: bool
    """Whether each rank's loss is its own, so that gradients are reduced as the wrapper reduces
    those of any other loss; otherwise the ranks' losses are parts of one."""
    digest: str
    """Of the common shape of all programs."""

    def settle(self, loss: Tensor, failure: BaseException | None) -> Tensor:
        """The loss of all ranks, or of this one with `mean`, once all have come to the end.

        Collective. Raises `failure`, or RankError where another rank has failed.
        """
        text = None if failure is None else described(failure)
        own = (text, 0.0 if failure else float(loss), self.digest)
        found = self.ranks.exchange(own)
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


def described(error: BaseException) -> str:
    """An error in one line, for other ranks."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else f"{type(error).__name__}."
