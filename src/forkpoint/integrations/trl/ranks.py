"""TRL's losses on several ranks, whose gradients are averaged over the ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from forkpoint.integrations.trl.rows import PackedRows
from forkpoint.losses.base import (
    Decomposition,
    FunctionLoss,
    Loss,
    LossBatch,
    LossFunction,
    LossOutputs,
)
from forkpoint.losses.router import RouterLoss
from forkpoint.policy import Policy, StepStats


def ranks_of(policy: Policy) -> int:
    """Ranks with rows of their own."""
    return 1 if policy.host.group is None else policy.host.group.ranks.size


@dataclass(frozen=True, repr=False)
class _PartsOfMean(Loss):
    """The mean over ranks of what a function gives on each, as one loss of all of them: beside it
    a step takes router losses, which are of all ranks as well."""

    decomposition: ClassVar[Decomposition] = "token"

    function: LossFunction
    ranks: int
    needs_entropy: bool = True

    def __repr__(self) -> str:
        """The same on all ranks, which compare it."""
        return f"the mean over {self.ranks} ranks of each one's loss"

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        return self.function(outputs, batch) / self.ranks


def additive(
    policy: Policy,
    function: LossFunction,
    router: RouterLoss | None,
    *,
    needs_entropy: bool = True,
) -> Loss:
    """A function that is a sum over tokens as a loss whose gradients are averaged over ranks."""
    if router is not None and policy.host.group is not None:
        return _PartsOfMean(function, ranks_of(policy), needs_entropy)
    return FunctionLoss(function, decomposition="token", needs_entropy=needs_entropy)


def weighted_step(
    policy: Policy,
    packed: PackedRows,
    weights: Mapping[str, Tensor],
    *,
    scale: float = 1.0,
    router: RouterLoss | None = None,
    router_counts: Tensor | None = None,
) -> StepStats:
    """A step of the sum of log-probs, and of entropies, times weights [T]: the gradients of a loss
    of them, whose own gradients by them the weights are."""

    def weighted(outputs: LossOutputs, batch: LossBatch) -> Tensor:
        at_T = batch.token_index
        parts = [(w_T[at_T] * outputs.per_token[n]).sum() for n, w_T in weights.items()]
        return torch.stack(parts).sum()

    loss = additive(policy, weighted, router, needs_entropy="entropies" in weights)
    return policy.forward_backward(
        packed.batch, loss, scale=scale, router=router, router_counts=router_counts
    )


def in_two_halves(
    policy: Policy,
    packed: PackedRows,
    losses: Callable[[Mapping[str, Tensor]], Tensor],
    scale: float,
    router: RouterLoss | None,
) -> tuple[StepStats, Tensor]:
    """A step whose loss is computed between scores and backwards, outside of both.

    TRL's metrics are collective. On several ranks each calls them here, at the same place, and not
    where its own plan happens to have its loss.
    """
    scores = policy.score(packed.batch, entropy=True, router=router)
    scored = dict(scores.per_token)
    names = ("logprobs", "entropies")
    leaves = [scored[name].requires_grad_() for name in names]
    with torch.enable_grad():
        value = losses(scored)
        found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    stats = weighted_step(
        policy,
        packed,
        dict(zip(names, found, strict=True)),
        scale=scale,
        router=router,
        router_counts=scores.rollout_expert_counts if router is not None else None,
    )
    return stats, value
