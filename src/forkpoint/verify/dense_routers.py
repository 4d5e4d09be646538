"""The loss of routers in ordinary dense training, one rollout's graph at a time.

Written from the definitions of `losses.RouterLoss`, on the logits that the stock model's routers
return and the experts that they choose. No forest, no segment, no microbatch: each rollout's tokens
are counted as the rollout has them. A first pass without a graph takes counts, which have no
gradient; each rollout's graph then has a part of its own of what is linear in probabilities. Where
several ranks run rollouts of one step they add up their counts between the two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.engine.routing import RouterTerms
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.modules import add_hook


@dataclass(frozen=True, eq=False)
class RouterSums:
    """One rank's part of a step's statistics, before any backward."""

    statistics: int
    """Those of its own rollouts."""
    counts_E: Tensor | None
    """float64 [E], on the CPU: choices of each expert, where one statistic is taken over the
    rollouts of all ranks; None where there are none."""
    rows: int
    """Pairs of token and layer that they are of."""


class DenseRouters:
    """Statistics of the routers of a stock model, over its rollouts, until the changes are undone.

    `begin` and `end` are called around a forward; what a backward runs again is not looked at.
    `counted` is called between the passes.
    """

    def __init__(
        self,
        routers: Sequence[nn.Module],
        terms: RouterTerms,
        changes: Changes,
        *,
        last_token: bool,
        joins: bool = False,
        gather: Callable[[RouterSums], Sequence[RouterSums]] | None = None,
    ) -> None:
        """
        Args:
            routers: modules of the model that runs, in the order of its layers.
            terms: of the loss.
            changes: those that end it.
            last_token: whether rollouts' last tokens count.
            joins: whether one statistic is taken over the rollouts of all ranks.
            gather: the sums of all ranks, from this one's; None where it is alone.
        """
        self.last_token: bool = last_token
        self._joins = joins
        self._gather = gather
        self._terms = terms
        self._parts = int(terms.parts.max(initial=-1)) + 1
        self._mean_over = self._parts
        """Statistics that the loss is the mean of."""
        self._layers = len(routers)
        self._open = False
        self._found: list[tuple[Tensor, Tensor]] = []
        self._counts_PE: Tensor | None = None
        self._probability_PE: Tensor | None = None
        self._z_P: Tensor | None = None
        self._rows_P: list[int] = [0] * self._parts
        for router in routers:
            add_hook(changes, router._forward_hooks, self._see)

    def _see(self, _: nn.Module, __: Any, output: Any) -> None:
        if not self._open:
            return
        if not isinstance(output, tuple) or output[-1].is_floating_point():
            raise UnsupportedError(
                "the model's routers do not return the experts chosen, so that ordinary training's "
                "router loss cannot be compared with. Upgrade transformers, or leave router= out."
            )
        self._found.append((output[0].flatten(0, -2), output[-1].detach().flatten(0, -2)))

    def begin(self) -> None:
        """A forward of one rollout begins."""
        self._found.clear()
        self._open = True

    def end(self) -> None:
        """It has ended."""
        self._open = False
        assert len(self._found) == self._layers, "each router runs once in a forward"

    @torch.no_grad()
    def count(self, rollout: int, dtype: torch.dtype) -> None:
        """Add a rollout's tokens to its statistic. dtype: of the loss."""
        part = int(self._terms.parts[rollout])
        for logits_TE, chosen_Tk in self._found:
            x = logits_TE.to(dtype)
            experts = x.shape[-1]
            if self._counts_PE is None:
                zeros = x.new_zeros(self._parts, experts, dtype=torch.float64)
                self._counts_PE, self._probability_PE = zeros, zeros.clone()
                self._z_P = zeros[:, 0].clone()
            assert self._probability_PE is not None and self._z_P is not None
            self._counts_PE[part] += torch.bincount(chosen_Tk.flatten(), minlength=experts)
            self._probability_PE[part] += x.softmax(-1).double().sum(0)
            self._z_P[part] += x.logsumexp(-1).square().double().sum()
            self._rows_P[part] += len(x)
        self._found.clear()

    def counted(self) -> None:
        """Every rollout of this rank has been counted. Collective where there are several."""
        if self._gather is None:
            return
        counts = None
        if self._joins and self._counts_PE is not None:
            counts = self._counts_PE[0].cpu()
        every = self._gather(RouterSums(self._parts, counts, sum(self._rows_P)))
        if not self._joins:
            self._mean_over = sum(each.statistics for each in every)
            return
        self._mean_over = 1
        self._rows_P = [sum(each.rows for each in every)] * self._parts
        if self._counts_PE is not None:
            found = [each.counts_E for each in every if each.counts_E is not None]
            self._counts_PE = torch.stack(found).sum(0)[None].to(self._counts_PE.device)

    def value(self) -> float:
        """The loss, once every rollout has been counted; of several ranks this one's part of it,
        all of which add up to the loss."""
        if self._counts_PE is None:
            return 0.0
        assert self._probability_PE is not None and self._z_P is not None
        experts, total = self._counts_PE.shape[1], 0.0
        for part, rows in enumerate(self._rows_P):
            if rows:
                balance = (self._counts_PE[part] / rows * (self._probability_PE[part] / rows)).sum()
                total += self._terms.load_balancing * experts * float(balance)
                total += self._terms.z * float(self._z_P[part]) / rows
        return total / self._mean_over

    def term(self, rollout: int, dtype: torch.dtype) -> Tensor | None:
        """The part of the loss that is this rollout's, with its graph; the sum over all rollouts of
        their parts is the loss, and of their gradients the gradient."""
        part = int(self._terms.parts[rollout])
        rows = self._rows_P[part]
        terms, total = self._terms, None
        assert self._counts_PE is not None or not self._found
        for logits_TE, _ in self._found:
            assert self._counts_PE is not None
            x = logits_TE.to(dtype)
            found = x.new_zeros(())
            if terms.load_balancing:
                share_E = (self._counts_PE[part] / rows).to(dtype)
                found = found + terms.load_balancing * x.shape[-1] * (x.softmax(-1) * share_E).sum()
            if terms.z:
                found = found + terms.z * x.logsumexp(-1).square().sum()
            found = found / (rows * self._mean_over)
            total = found if total is None else total + found
        self._found.clear()
        return total
