"""Comparison of steps where several ranks hold the model, each with rollouts of its own.

Plans run through the wrapper, on all ranks. Ordinary training and the reference run on a whole copy
of the model, on each rank with that rank's rollouts; their gradients are then added up.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from forkpoint.dense import DenseRun
from forkpoint.engine.distributed import Distributed
from forkpoint.errors import RankError, UnsupportedError
from forkpoint.hosts.whole_copies import full
from forkpoint.losses.base import Denominators, Loss, is_own
from forkpoint.losses.views import batch_denominators
from forkpoint.parallel.agreement import group_digests
from forkpoint.parallel.step import described
from forkpoint.rollouts import RolloutBatch
from forkpoint.verify_plans import (
    ACROSS,
    CHOSEN,
    WITHIN,
    Choice,
    Compared,
    Planning,
    SharedCounts,
    count_shared,
)

T = TypeVar("T")


class Together(Protocol):
    """One comparison, of one rank or of several; every method is collective."""

    whole: bool
    """Whether the model is whole on this rank, so that it can run by itself."""

    def run(self, work: Callable[[], T]) -> T:
        """Call `work`, which is this rank's own. Raises its error, or RankError for that of another
        rank."""
        ...

    def choice(self, choice: Choice, policy: Planning, batch: RolloutBatch, loss: Loss) -> Choice:
        """The plans to compare: on every rank as many, of the same kinds."""
        ...

    def denominators(self, batch: RolloutBatch) -> Denominators:
        """Counts that the loss's means are taken over."""
        ...

    def total(self, found: DenseRun, model: nn.Module, dtype: torch.dtype) -> DenseRun:
        """Gradients (in `dtype`, of the model's parameters) and the loss of all ranks' runs;
        log-probs stay this rank's."""
        ...

    def gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        """Gradients of the model, whole, by name."""
        ...

    def most(self, value: float) -> float:
        """The largest value of all ranks."""
        ...

    def counts(self, counts: SharedCounts) -> SharedCounts:
        """Counts of all ranks' plans."""
        ...

    def tokens(self, count: int) -> int:
        """Tokens of all ranks."""
        ...


def together(group: Distributed | None, loss: Loss) -> Together:
    """Raises UnsupportedError for losses that are computed from all ranks' log-probs."""
    if group is None:
        return Alone()
    if loss.across_ranks:
        raise UnsupportedError(
            f"{loss!r} gathers the log-probs of all ranks (across_ranks), which ordinary training "
            "on each rank, with which verify compares, does not. Verify it in one process, with a "
            "model of the same shape and few layers if need be."
        )
    return OnRanks(group, mean=is_own(loss))


class Alone:
    """One rank."""

    whole = True

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def choice(self, choice: Choice, policy: Planning, batch: RolloutBatch, loss: Loss) -> Choice:
        return choice

    def denominators(self, batch: RolloutBatch) -> Denominators:
        return batch_denominators(batch)

    def total(self, found: DenseRun, model: nn.Module, dtype: torch.dtype) -> DenseRun:
        return found

    def gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        return {name: p.grad for name, p in model.named_parameters()}

    def most(self, value: float) -> float:
        return value

    def counts(self, counts: SharedCounts) -> SharedCounts:
        return counts

    def tokens(self, count: int) -> int:
        return count


class OnRanks:
    """Several ranks."""

    def __init__(self, group: Distributed, *, mean: bool) -> None:
        """`mean`: whether each rank's loss is its own, so that gradients are averaged."""
        self.group = group
        self.mean = mean
        self.whole: bool = not group.reduces
        self._names: list[str] = []

    def run(self, work: Callable[[], T]) -> T:
        found, error = None, None
        try:
            found = work()
        except Exception as raised:  # any, since the others wait
            error = raised
        ranks = self.group.ranks
        texts = ranks.exchange(None if error is None else described(error))
        if error is not None:
            raise error
        for rank, text in zip(ranks.global_ranks, texts, strict=True):
            if text is not None:
                raise RankError(
                    f"rank {rank} cannot compare, so no rank does: {text} Nothing was changed."
                )
        return found  # pyright: ignore[reportReturnType]

    def choice(self, choice: Choice, policy: Planning, batch: RolloutBatch, loss: Loss) -> Choice:
        every = self.group.ranks.exchange((choice.reason, [c.kind for c in choice.compared]))
        there = {kind for _, kinds in every for kind in kinds}
        if not there:
            reasons = [reason for reason, _ in every if reason is not None]
            return replace(choice, reason=choice.reason if len(batch) else reasons[-1])
        own = {entry.kind: entry for entry in choice.compared}
        plan = self.run(
            lambda: next((entry.plan for entry in own.values()), None) or policy.plan(batch, loss)
        )
        spare = Compared(CHOSEN, plan, count_shared(plan))
        kinds = [kind for kind in (WITHIN, ACROSS, CHOSEN) if kind in there]
        return Choice(
            tuple(own.get(kind) or replace(spare, kind=kind) for kind in kinds),
            tuple(entry for entry in choice.left_out if entry.kind not in there),
            None,
        )

    def denominators(self, batch: RolloutBatch) -> Denominators:
        own = batch_denominators(batch)
        if self.mean:
            return own
        every = self.group.ranks.exchange((own.tokens, own.rollouts, group_digests(batch)))
        digests = np.concatenate([groups for _, _, groups in every])
        return Denominators(
            tokens=sum(tokens for tokens, _, _ in every),
            rollouts=sum(rollouts for _, rollouts, _ in every),
            groups=float(len(np.unique(digests))),
        )

    def total(self, found: DenseRun, model: nn.Module, dtype: torch.dtype) -> DenseRun:
        ranks = self.group.ranks
        own = [gradient is not None for gradient in found.gradients.values()]
        every = ranks.exchange((found.loss, own))
        there = [any(column) for column in zip(*(own for _, own in every), strict=True)]
        parameters = dict(model.named_parameters())
        sums: dict[str, Tensor | None] = {}
        for (name, gradient), is_there in zip(found.gradients.items(), there, strict=True):
            sums[name] = None
            if is_there:
                p = parameters[name]
                zeros = torch.zeros(
                    p.shape if gradient is None else 0, dtype=dtype, device=p.device
                )
                added = zeros if gradient is None else gradient.contiguous()
                self.group.add_up(added)
                sums[name] = added / ranks.size if self.mean else added
        loss = found.loss if self.mean else sum(loss for loss, _ in every)
        return replace(found, loss=loss, gradients=sums)

    def gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        return _WholeGradients(model)

    def most(self, value: float) -> float:
        return max(self.group.ranks.exchange(value))

    def counts(self, counts: SharedCounts) -> SharedCounts:
        every = self.group.ranks.exchange(counts)
        added = {name: sum(getattr(each, name) for each in every) for name in vars(counts)}
        return SharedCounts(**{**added, "cache_tokens": max(each.cache_tokens for each in every)})

    def tokens(self, count: int) -> int:
        return sum(self.group.ranks.exchange(count))


class _WholeGradients(Mapping[str, Tensor | None]):
    """Gradients of a sharded model, each gathered when it is asked for. Collective."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())

    def __getitem__(self, name: str) -> Tensor | None:
        gradient = self._parameters[name].grad
        return None if gradient is None else full(gradient)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
