"""The ranks of a replay: what must be the same, which rollouts each has, and sums over shards."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forkpoint.errors import ConfigError
from forkpoint.losses.base import Loss
from forkpoint.parallel.group import RankGroup
from forkpoint.parallel.placement import place
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import RolloutBatch, short


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
