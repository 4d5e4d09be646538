"""Gradients of a step's loss: by the values of the head, and by every other leaf that it reads.

A loss is computed from copies of the head's values, and its backward runs at once. The gradients at
the copies are what a microbatch's backward starts from. A loss may read trainable tensors besides:
parameters of the model (a pull to the start weights), or leaves that are none of the model's (a
learned coefficient). These get their gradients from the same backward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forkpoint.engine.distributed import ModelHolder, holder_of
from forkpoint.engine.guard import GradientGuard
from forkpoint.engine.host import Host
from forkpoint.errors import UnsupportedError
from forkpoint.losses.leaves import leaves_of
from forkpoint.parallel.step import RankStep


@dataclass(frozen=True, eq=False)
class LossPart:
    """A loss of some rollouts or tokens, and its gradients."""

    value: Tensor
    """Without a graph."""
    gradients: Mapping[str, Tensor]
    """By name, at the values of the head that it was computed from, times the step's factors; none
    for values that it does not depend on."""


class LossGradients:
    """Computes parts of one step's loss, and their gradients."""

    def __init__(self, host: Host, guard: GradientGuard, ranks: RankStep, scale: float) -> None:
        """
        Args:
            host: the model.
            guard: of the step.
            ranks: of the step.
            scale: a factor on every gradient, that of the caller.
        """
        self.guard = guard
        self.ranks = ranks
        self.holder: ModelHolder = holder_of(host.group)
        self._reduced: float = self.holder.factor(mean=ranks.mean)
        """The factor for gradients that the wrapper reduces over ranks."""
        self.factor: float = scale * self._reduced

    def of(
        self,
        loss: Callable[[Mapping[str, Tensor]], Tensor],
        per_token: Mapping[str, Tensor],
        *,
        counts: bool = True,
    ) -> LossPart:
        """Compute a part of the loss, and add the gradients of the leaves that it reads besides.

        Args:
            loss: gives a scalar, computed from copies of `per_token`.
            per_token: by name, values of the head.
            counts: whether this rank is the one that counts among those that compute the same loss
                from the values of all ranks.
        """
        copies = {n: x.detach().requires_grad_(x.requires_grad) for n, x in per_token.items()}
        with torch.enable_grad():
            value = loss(copies)
        if not value.requires_grad:
            return LossPart(value.detach(), {})
        own = {id(x) for x in copies.values()}
        reached = [leaf for leaf in leaves_of(value) if id(leaf) not in own]
        added, apart = self._of_model(reached)
        # Of the ranks that compute one loss, one adds to gradients that are summed over ranks.
        added = self._beside_twins(value, added) if counts else []
        inputs = [*(x for x in copies.values() if x.requires_grad), *added, *apart]
        if inputs:
            self.guard.begin_loss(added)
            self.guard.others.begin(apart)
            torch.autograd.backward(value, torch.full_like(value, self.factor), inputs=inputs)
            self.guard.others.end(apart, float(counts) / self._reduced)
        found = {name: x.grad for name, x in copies.items() if x.grad is not None}
        return LossPart(value.detach(), found)

    def _beside_twins(self, value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        """Add gradients by parameters in whose place forwards use twins; gives the other leaves.

        Their own nodes are not run: a wrapper listens there (DistributedDataParallel).
        """
        sums = self.guard.sums
        if sums is None:
            return leaves
        summed = set(sums.parameters)
        held = [p for p in leaves if p in summed and p not in sums.leaves]
        if held:
            scale = torch.full_like(value, self.factor)
            found = torch.autograd.grad(value, held, scale, retain_graph=True)
            for parameter, gradient in zip(held, found, strict=True):
                assert isinstance(parameter, nn.Parameter)
                sums.add(parameter, gradient)
        return [leaf for leaf in leaves if all(leaf is not p for p in held)]

    def _of_model(self, leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Leaves that are parameters of the model, and the others, which no wrapper reduces.

        Raises UnsupportedError for parameters whose gradient would not be exact.
        """
        holder, ranks = self.holder, self.ranks
        known: set[Tensor] = set(self.guard.parameters)
        # Of split models; DistributedDataParallel sums all of them apart.
        parts = set(holder.deferred_params(self.guard.parameters)) if holder.lockstep else set()
        for leaf in leaves:
            if leaf in parts:
                raise UnsupportedError(
                    "the loss reads a parameter of which every rank of a split model computes "
                    f"a part of the gradient (shape {tuple(leaf.shape)}), and the loss's own "
                    "would be counted on each. Run a backward of that term by itself."
                )
            if leaf in known and holder.reduces and not ranks.mean:
                raise UnsupportedError(
                    "the loss is one of all ranks, and reads a parameter of which this rank "
                    f"holds a shard (shape {tuple(leaf.shape)}): its gradient would be that of "
                    "this rank's part. Give the loss as a function, which is each rank's own, "
                    "or run a backward of that term by itself."
                )
        known |= set(holder.whole_parameters())
        if self.guard.sums is not None:
            known |= set(self.guard.sums.leaves)
        added = [leaf for leaf in leaves if leaf in known]
        return added, [leaf for leaf in leaves if leaf not in known]
