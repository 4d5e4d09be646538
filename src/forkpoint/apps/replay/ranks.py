"""The ranks of a replay: what they exchange, which rollouts each has, and sums over shards."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forkpoint.errors import ConfigError, ForkpointError, RankError
from forkpoint.losses.base import Loss
from forkpoint.parallel.call import of_backend
from forkpoint.parallel.placement import place
from forkpoint.parallel.ranks import DataRanks
from forkpoint.parallel.step import described
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import RolloutBatch, short

T = TypeVar("T")


def lost_rank(error: BaseException) -> BaseException:
    """The error to raise for one of a collective; other errors are returned as they are."""
    if isinstance(error, ForkpointError) or not of_backend(error):
        return error
    return RankError(
        "a rank of this replay has died or ended: look at the output of the other ranks. Start all "
        f"of them again, with --resume if there is a folder. The collective's error: "
        f"{described(error)}"
    )


class RankGroup:
    """The ranks that replay one model together; by default this process alone.

    The first rank writes the folder.
    """

    def __init__(self, ranks: DataRanks | None = None) -> None:
        self._ranks = ranks
        self.is_sharded: bool = ranks is not None
        self.index: int = 0 if ranks is None else ranks.index
        self.size: int = 1 if ranks is None else ranks.size
        self.names: tuple[int, ...] = (0,) if ranks is None else ranks.global_ranks

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks. Collective. Raises RankError if one has died or ended."""
        if self._ranks is None:
            return [value]
        try:
            return self._ranks.exchange(value)
        except RuntimeError as error:
            raise lost_rank(error) from error

    def first(self, work: Callable[[], T]) -> T:
        """Call `work` on the first rank, and return its value on all of them. Collective."""
        value = self.each(work if self.index == 0 else lambda: None)
        return self.exchange(value)[0]  # pyright: ignore[reportReturnType]

    def each(self, work: Callable[[], T]) -> T:
        """Call `work` on every rank. Collective.

        If it fails on one rank, that rank raises the error and the others RankError, which names
        the rank.
        """
        value, error = None, None
        try:
            value = work()
        except (ForkpointError, OSError) as raised:
            error = raised
        except RuntimeError as raised:
            raise lost_rank(raised) from raised
        found = self.exchange(None if error is None else described(error))
        if error is not None:
            raise error
        for rank, text in zip(self.names, found, strict=True):
            if text is not None:
                raise RankError(f"rank {rank} cannot go on with the replay: {text}")
        return value  # pyright: ignore[reportReturnType]


def check_same(ranks: RankGroup, replay: Mapping[str, object]) -> None:
    """Raises ConfigError on all ranks if one replays something else. Collective."""
    every = ranks.exchange({name: repr(value) for name, value in replay.items()})
    for number, other in zip(ranks.names, every, strict=True):
        for name, value in other.items():
            if value != every[0][name]:
                raise ConfigError(
                    f"the ranks replay different things: {name} is {short(every[0][name])} on rank "
                    f"{ranks.names[0]} and {short(value)} on rank {number}. Start every rank with "
                    "the same file, model and options."
                )


def placed(
    ranks: RankGroup, batch: RolloutBatch, policy: Policy, loss: Loss, *, runs_all: bool
) -> RolloutBatch:
    """This rank's rollouts of a batch. The first rank, which writes rows, has some.

    runs_all: whether rollouts without gradient are run as well.
    """
    if not ranks.is_sharded:
        return batch
    parts = place(
        batch,
        ranks=ranks.size,
        model=policy.host.shape,
        whole_groups=loss.decomposition != "token",
        max_microbatch_tokens=policy.config.max_microbatch_tokens,
        loss=None if runs_all else loss,
    )
    return batch.select(sorted(parts, key=lambda part: not part)[ranks.index])


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor as one process has it. Collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip(parameters: list[nn.Parameter], most: float, norm: Tensor) -> None:
    """Scale gradients down to a norm, as torch does; `norm` is theirs over all ranks."""
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local.mul_(factor.to(local.device))
