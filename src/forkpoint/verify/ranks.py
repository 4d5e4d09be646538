"""Communication of `verify` between the ranks of a model, each with its rollouts.

All ranks run plans on the wrapped model. For ordinary training and the reference, each rank runs
its rollouts on a whole copy of the model, and gradients are then summed. Ranks that hold one copy
of the model together have one batch, which counts once.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from forkpoint.engine.distributed import Distributed
from forkpoint.engine.feature import Links
from forkpoint.errors import RankError, UnsupportedError
from forkpoint.hosts.torch_dist.copies import full
from forkpoint.losses.base import Denominators, Loss, is_own
from forkpoint.losses.router import RouterLoss
from forkpoint.losses.views import batch_denominators
from forkpoint.parallel.agreement import group_digests
from forkpoint.parallel.call import RankGroup
from forkpoint.parallel.copies import check_same_batches, contents_of
from forkpoint.parallel.statistics import joined
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.request import StepPolicy
from forkpoint.step.router_steps import RouterWork, describe_routers
from forkpoint.verify.dense import DenseRun
from forkpoint.verify.plans import ACROSS, CHOSEN, WITHIN, Choice, Kind, SharedCounts

T = TypeVar("T")


class RankComm:
    """Communication of the ranks of a comparison. Every method is collective, and does nothing on
    one process."""

    def __init__(self, group: Distributed, loss: Loss, links: Links) -> None:
        """Prepare the exchanges of one comparison.

        Args:
            group: the ranks that hold the model.
            loss: the loss of the step.
            links: links to ranks that have other blocks.

        Raises:
            UnsupportedError: the loss needs the log-probs of all ranks.
        """
        if loss.across_ranks and not group.ranks.is_alone:
            raise UnsupportedError(
                f"{loss!r} gathers the log-probs of all ranks (across_ranks). verify compares with "
                "training on each rank alone, which does not. Verify the loss in one process, with "
                "a smaller model if needed."
            )
        self.group = group
        self.calls: RankGroup = RankGroup(group.ranks)
        self.mean: bool = is_own(loss)
        """Whether each rank has its own loss, so that gradients are averaged."""
        self.links: Links = links
        self.staged: bool = "stage" in group.topology.relations
        """Whether this rank has some of the blocks."""
        parts = group.topology.reduces or "tensor" in group.topology.relations
        self.whole: bool = not (parts or self.staged)
        """Whether this rank has the whole model and can run it without other ranks."""

    def _exchange(self, value: T) -> list[T]:
        return self.calls.exchange(value)

    def _of_batches(self, value: T) -> list[T]:
        """Values of all ranks, with those of one batch once."""
        every = self._exchange(value)
        return [every[n] for n in self.group.topology.contributors]

    def run(self, work: Callable[[], T]) -> T:
        """Call `work` on this rank.

        Raises its error, or RankError if `work` failed on another rank.
        """
        return self.calls.each(work, tells=(Exception,))

    def gather(self, value: T) -> list[T]:
        """Collect the values of all batches. Call it inside `run`, once. Raises the errors of
        `run`."""
        every = self.calls.gather(value)
        return [every[n] for n in self.group.topology.contributors]

    def check_routers(self, router: RouterLoss | None, work: RouterWork | None) -> None:
        """Raise RankError or ConfigError if ranks have different router statistics, and
        RolloutError if these have no tokens."""
        ranks = self.group.ranks
        every = self._exchange((describe_routers(router), work.share() if work else None))
        calls = {call: rank for rank, (call, _) in zip(ranks.global_ranks, every, strict=True)}
        if len(calls) > 1:
            given = "; ".join(f"rank {n}: {call[2:] or 'no router'}" for call, n in calls.items())
            raise RankError(
                f"the ranks do not verify the same router loss: {given}. Give every rank the same "
                "router=, or none."
            )
        joined([share for _, share in every], ranks.global_ranks, ranks.batches)

    def choice(
        self,
        choice: Choice,
        policy: StepPolicy,
        batch: RolloutBatch,
        loss: Loss,
        router: RouterLoss | None,
    ) -> Choice:
        """Choose the plans to compare. All ranks have plans of the same kinds.

        Raises RankError if ranks of one copy of the model have different batches.
        """
        if self.group.topology.shares_batches:
            ranks = self.group.ranks
            own = contents_of(batch, [*choice.plans.values()], (), policy.config)
            check_same_batches(self._exchange(own), ranks.global_ranks, ranks.batches)
        every = self._exchange((choice.reason, [*choice.plans]))
        there = {kind for _, kinds in every for kind in kinds}
        if not there:
            reasons = [reason for reason, _ in every if reason is not None]
            return replace(choice, reason=choice.reason if len(batch) else reasons[-1])
        plans = choice.plans
        spare = self.run(
            lambda: next(iter(plans.values()), None) or policy.plan(batch, loss, router=router)
        )
        kinds: tuple[Kind, ...] = (WITHIN, ACROSS, CHOSEN)
        return Choice(
            {kind: plans.get(kind, spare) for kind in kinds if kind in there},
            tuple(entry for entry in choice.left_out if entry.kind not in there),
        )

    def denominators(self, batch: RolloutBatch) -> Denominators:
        """Denominators of the loss, over all ranks."""
        own = batch_denominators(batch)
        if self.mean:
            return own
        every = self._of_batches((own.tokens, own.rollouts, group_digests(batch)))
        digests = np.concatenate([groups for _, _, groups in every])
        return Denominators(
            tokens=sum(tokens for tokens, _, _ in every),
            rollouts=sum(rollouts for _, rollouts, _ in every),
            groups=float(len(np.unique(digests))),
        )

    def total(self, found: DenseRun, model: nn.Module, dtype: torch.dtype) -> DenseRun:
        """Sum the gradients of this stage's parameters (in `dtype`) and the losses over all ranks.

        Log-probs stay those of this rank.
        """
        if self.group.ranks.is_alone:
            return found
        parameters = dict(model.named_parameters())
        own = [gradient is not None for gradient in found.gradients.values()]
        every = self._of_batches((found.loss, own, found.router_loss))
        there = [any(column) for column in zip(*(own for _, own, _ in every), strict=True)]
        sums: dict[str, Tensor | None] = dict.fromkeys(found.gradients)
        for (name, gradient), is_there in zip(found.gradients.items(), there, strict=True):
            if name not in parameters:  # of another stage
                del sums[name]
                continue
            if not is_there:
                continue
            p = parameters[name]
            if gradient is None:
                gradient = torch.zeros(p.shape, dtype=dtype, device=p.device)
            # Gradients of blocks in host memory are in host memory.
            added = full(gradient).contiguous().to(p.device)
            self.group.all_reduce(added)
            sums[name] = added.to(gradient.device) / (len(every) if self.mean else 1)
        asides = [aside for _, _, aside in every if aside is not None]
        return replace(
            found,
            loss=found.loss if self.mean else sum(loss for loss, _, _ in every),
            gradients=sums,
            router_loss=sum(asides) if asides else None,
        )

    def of_stages(self, values: Mapping[str, T]) -> dict[str, T]:
        """Merge values by parameter name over all stages."""
        return {name: x for each in self.links.exchange(values) for name, x in each.items()}

    def every(self, passed: bool) -> bool:
        """Whether `passed` is True on all ranks."""
        return all(self._exchange(passed))

    def most(self, value: float) -> float:
        """Largest value of all ranks."""
        return max(self._exchange(value))

    def counts(self, counts: SharedCounts) -> SharedCounts:
        """Counts of the plans of all ranks."""
        every = self._of_batches(counts)
        added = {name: sum(getattr(each, name) for each in every) for name in vars(counts)}
        return SharedCounts(**{**added, "cache_tokens": max(each.cache_tokens for each in every)})

    def tokens(self, count: int) -> int:
        """Number of tokens of all ranks."""
        return sum(self._of_batches(count))
