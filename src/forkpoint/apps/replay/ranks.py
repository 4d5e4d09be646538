"""Steps of a replay on several ranks: which rollouts a rank has, and sums over shards."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.apps.replay.team import Team
from forkpoint.errors import ConfigError
from forkpoint.losses.base import Loss
from forkpoint.parallel.placement import place
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import RolloutBatch, short


def team_of(policy: Policy) -> Team | None:
    """The ranks that hold a policy's model; None where this process does alone."""
    group = policy.host.group
    return None if group is None else Team(group.ranks)


def check_same(team: Team, replay: Mapping[str, Any]) -> None:
    """Raises ConfigError on all ranks where one replays something else. Collective."""
    every = team.exchange({name: repr(value) for name, value in replay.items()})
    for number, other in zip(team.ranks.global_ranks, every, strict=True):
        for name, value in other.items():
            if value != every[0][name]:
                raise ConfigError(
                    f"the ranks replay different things: {name} is {short(every[0][name])} on rank "
                    f"{team.ranks.global_ranks[0]} and {short(value)} on rank {number}. Start "
                    "every rank with the same file, model and options."
                )


def placed(
    team: Team, batch: RolloutBatch, policy: Policy, loss: Loss, *, runs_all: bool
) -> RolloutBatch:
    """This rank's rollouts of a batch. The first rank, which writes rows, has some.

    `runs_all`: whether rollouts without gradient are run as well.
    """
    parts = place(
        batch,
        ranks=team.size,
        model=policy.host.shape,
        whole_groups=loss.decomposition != "token",
        max_microbatch_tokens=policy.config.max_microbatch_tokens,
        loss=None if runs_all else loss,
    )
    return batch.select(sorted(parts, key=lambda part: not part)[team.index])


def whole(tensor: Tensor) -> Tensor:
    """A tensor as one process has it. Collective where it is sharded."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def clip(parameters: list[nn.Parameter], most: float, norm: Tensor) -> None:
    """Scale gradients down to a norm, as torch does; `norm` is theirs over all ranks."""
    sharded = [p.grad for p in parameters if hasattr(p.grad, "to_local")]
    if not sharded:
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            local = grad.to_local() if hasattr(grad, "to_local") else grad  # pyright: ignore
            local.mul_(factor.to(local.device))
