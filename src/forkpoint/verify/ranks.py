"""Comparison of steps where several ranks hold the model, each with rollouts of its own.

Plans run through the wrapper, on all ranks. Ordinary training and the reference run on a whole copy
of the model, on each rank with that rank's rollouts; their gradients are then added up. Of a model
that is split over ranks the copy is split as well, and each rank compares its parts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forkpoint.engine.distributed import Distributed
from forkpoint.errors import RankError, UnsupportedError
from forkpoint.hosts.torch_dist.copies import copy_in, full
from forkpoint.hosts.transformers.split_copies import TensorParts, lengths_of_parts
from forkpoint.losses.base import Denominators, Loss, is_own
from forkpoint.losses.router import RouterLoss
from forkpoint.losses.views import batch_denominators
from forkpoint.parallel.agreement import group_digests
from forkpoint.parallel.copies import check_same_batches, contents_of
from forkpoint.parallel.statistics import joined
from forkpoint.parallel.step import described
from forkpoint.parallel.watch import Watch
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.router_steps import RouterWork, describe_routers
from forkpoint.verify.dense import DenseRun
from forkpoint.verify.memory import MemoryStrategies
from forkpoint.verify.plans import (
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


class SingleProcess:
    """Comparison in one process. Subclasses compare on several ranks; there every method is
    collective."""

    whole = True
    """Whether the model is whole on this rank, so that it can run by itself."""
    streams = True
    """Whether a copy's blocks may stay in the host's memory until they run."""

    def run(self, work: Callable[[], T]) -> T:
        """Call `work`, which is this rank's own. Raises its error, or RankError for that of another
        rank."""
        return work()

    def gather(self, value: T) -> list[T]:
        """The values of all batches, within `run`, and once in each: where memory runs out after it
        and the work is begun again, the first values stay. Raises as `run` does."""
        return [value]

    def same_routers(self, router: RouterLoss | None, work: RouterWork | None) -> None:
        """Raise RankError or ConfigError where ranks do not take the same statistics of routers,
        and RolloutError where these have no tokens."""

    def strategies(self, strategies: MemoryStrategies) -> MemoryStrategies:
        """The strategies to save memory that are tried one after the other."""
        return strategies

    def elements(self, name: str, parameter: nn.Parameter) -> int:
        """Elements of a parameter that a copy has on this rank."""
        return parameter.numel()

    def copy_in(
        self, model: nn.Module, blocks: nn.ModuleList, dtype: torch.dtype, *, streamed: bool
    ) -> tuple[nn.Module, nn.ModuleList]:
        """A copy that runs this rank's rollouts, and its blocks."""
        return copy_in(model, blocks, dtype, streamed=streamed)

    def lengths(self, own: dict[str, float]) -> dict[str, float]:
        """Euclidean lengths of whole gradients, by parameter, from those that this rank has."""
        return own

    def every(self, passed: bool) -> bool:
        """Whether it is so on all ranks."""
        return passed

    def choice(
        self,
        choice: Choice,
        policy: Planning,
        batch: RolloutBatch,
        loss: Loss,
        router: RouterLoss | None,
    ) -> Choice:
        """The plans to compare: on every rank as many, of the same kinds."""
        return choice

    def denominators(self, batch: RolloutBatch) -> Denominators:
        """Counts that the loss's means are taken over."""
        return batch_denominators(batch)

    def total(self, found: DenseRun, model: nn.Module, dtype: torch.dtype) -> DenseRun:
        """Gradients (in `dtype`, of what this rank has of the model's parameters) and the loss of
        all ranks' runs; log-probs, and gradients of leaves that are no parameters of the model,
        stay this rank's."""
        direct, others = _split(found, model)
        gradients = dict(found.gradients)
        for name, added in direct.items():
            gradient = gradients[name]
            gradients[name] = added.to(dtype) if gradient is None else gradient + added.to(gradient)
        return replace(found, gradients=gradients, besides=others)

    def gradients(
        self, model: nn.Module, others: Mapping[str, Tensor | None]
    ) -> Mapping[str, Tensor | None]:
        """Gradients of the model, of what this rank has of them, by name, and `others`."""
        return {**{name: p.grad for name, p in model.named_parameters()}, **others}

    def most(self, value: float) -> float:
        """The largest value of all ranks."""
        return value

    def counts(self, counts: SharedCounts) -> SharedCounts:
        """Counts of all ranks' plans."""
        return counts

    def tokens(self, count: int) -> int:
        """Tokens of all ranks."""
        return count


class DataParallel(SingleProcess):
    """Several ranks, with rollouts of their own."""

    def __init__(self, group: Distributed, *, mean: bool) -> None:
        """`mean`: whether each rank's loss is its own, so that gradients are averaged."""
        self.group = group
        self.mean = mean
        self.whole: bool = not group.reduces
        self._gathered: list[Any] | None = None
        self._told = False
        """Whether all ranks know that one has failed in this run."""

    def _of_batches(self, value: T) -> list[T]:
        """The values of all ranks, those with one batch once."""
        every = self.group.ranks.exchange(value)
        return [every[first] for first in self.group.ranks.firsts]

    def gather(self, value: T) -> list[T]:
        ranks = self.group.ranks
        if self._gathered is None:
            # In a tuple: a rank that has failed gives its error's text, in `run`.
            found: list[Any] = ranks.exchange((value,))
            for rank, each in zip(ranks.global_ranks, found, strict=True):
                if not isinstance(each, tuple):
                    self._told = True
                    raise _cannot(rank, each)
            self._gathered = [found[first][0] for first in ranks.firsts]
        return self._gathered

    def same_routers(self, router: RouterLoss | None, work: RouterWork | None) -> None:
        ranks = self.group.ranks
        every = ranks.exchange((describe_routers(router), work.share() if work else None))
        calls = {call: rank for rank, (call, _) in zip(ranks.global_ranks, every, strict=True)}
        if len(calls) > 1:
            given = "; ".join(f"rank {n}: {call[2:] or 'no router'}" for call, n in calls.items())
            raise RankError(
                f"the ranks do not verify the same router loss: {given}. Give every rank the same "
                "router=, or none."
            )
        joined([share for _, share in every], ranks.global_ranks, ranks.batches)

    def run(self, work: Callable[[], T]) -> T:
        found, error = None, None
        self._gathered, self._told = None, False
        try:
            found = work()
        except Exception as raised:  # any, since the others wait
            if self._told:
                raise
            error = raised
        ranks = self.group.ranks
        try:
            texts = ranks.exchange(None if error is None else described(error))
        except RuntimeError:  # of the backend: the others have ended
            if error is not None:
                raise error from None
            raise
        if error is not None:
            raise error
        for rank, text in zip(ranks.global_ranks, texts, strict=True):
            if text is not None:
                raise _cannot(rank, text)
        return found  # pyright: ignore[reportReturnType]

    def choice(
        self,
        choice: Choice,
        policy: Planning,
        batch: RolloutBatch,
        loss: Loss,
        router: RouterLoss | None,
    ) -> Choice:
        every = self.group.ranks.exchange((choice.reason, [c.kind for c in choice.compared]))
        there = {kind for _, kinds in every for kind in kinds}
        if not there:
            reasons = [reason for reason, _ in every if reason is not None]
            return replace(choice, reason=choice.reason if len(batch) else reasons[-1])
        own = {entry.kind: entry for entry in choice.compared}
        plan = self.run(
            lambda: (
                next((entry.plan for entry in own.values()), None)
                or policy.plan(batch, loss, router=router)
            )
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
        every = self._of_batches((own.tokens, own.rollouts, group_digests(batch)))
        digests = np.concatenate([groups for _, _, groups in every])
        return Denominators(
            tokens=sum(tokens for tokens, _, _ in every),
            rollouts=sum(rollouts for _, rollouts, _ in every),
            groups=float(len(np.unique(digests))),
        )

    def total(self, found: DenseRun, model: nn.Module, dtype: torch.dtype) -> DenseRun:
        direct, others = _split(found, model)
        own = [gradient is not None for gradient in found.gradients.values()]
        every = self._of_batches((found.loss, own, found.router_loss))
        there = [any(column) for column in zip(*(own for _, own, _ in every), strict=True)]
        read = {name for names in self.group.ranks.exchange(list(direct)) for name in names}
        parameters = dict(model.named_parameters())
        sums: dict[str, Tensor | None] = {}
        for (name, gradient), is_there in zip(found.gradients.items(), there, strict=True):
            sums[name] = None
            if is_there or name in read:
                p = parameters[name]
                if gradient is None:
                    shape = self._shape(name, p)
                    added = torch.zeros(shape, dtype=dtype, device=p.device)
                else:
                    added = self._own(name, gradient).contiguous()
                if name in read:
                    more = direct[name] if name in direct else torch.zeros_like(p).detach()
                    added = added + self._own(name, more).to(added)
                self.group.all_reduce(added)
                sums[name] = added / len(every) if self.mean else added
        loss = found.loss if self.mean else sum(loss for loss, _, _ in every)
        asides = [aside for _, _, aside in every if aside is not None]
        aside = sum(asides) if asides else None
        return replace(found, loss=loss, gradients=sums, router_loss=aside, besides=others)

    def _shape(self, name: str, parameter: nn.Parameter) -> torch.Size:
        """The shape of what this rank has of a gradient."""
        return parameter.shape

    def _own(self, name: str, gradient: Tensor) -> Tensor:
        """This rank's part of a gradient that a step or a copy's run has left. Collective."""
        return full(gradient)

    def gradients(
        self, model: nn.Module, others: Mapping[str, Tensor | None]
    ) -> Mapping[str, Tensor | None]:
        return _Gradients(model, self._own, others)

    def every(self, passed: bool) -> bool:
        return all(self.group.ranks.exchange(passed))

    def most(self, value: float) -> float:
        return max(self.group.ranks.exchange(value))

    def counts(self, counts: SharedCounts) -> SharedCounts:
        every = self._of_batches(counts)
        added = {name: sum(getattr(each, name) for each in every) for name in vars(counts)}
        return SharedCounts(**{**added, "cache_tokens": max(each.cache_tokens for each in every)})

    def tokens(self, count: int) -> int:
        return sum(self._of_batches(count))


class TensorParallel(DataParallel):
    """Ranks over which transformers has split the model. Those of one tensor-parallel group have
    one batch; ordinary training of it runs on a copy that they hold together."""

    streams = False

    def __init__(self, group: Distributed, model: nn.Module, *, mean: bool) -> None:
        super().__init__(group, mean=mean)
        self.whole = False
        self.parts: TensorParts = TensorParts(model, group.splits)
        batches, ranks = group.ranks.batches, group.ranks
        self._copy = [n for n, batch in enumerate(batches) if batch == batches[ranks.index]]
        """Indices of the ranks that hold this rank's copy."""

    def run(self, work: Callable[[], T]) -> T:
        # The copy's ranks meet in collectives. One that fails between these does not come to them.
        ranks = self.group.ranks
        ranks.phase = "apart"
        watch = Watch(ranks.index, ranks.global_ranks, ranks.calls + 1, ranks.store)
        ranks.watch = watch
        watch.start()

        def watched() -> T:
            try:
                return work()
            except Exception as error:
                ranks.may_be_missed(error)
                raise

        try:
            return super().run(watched)
        finally:
            watch.end()

    def choice(
        self,
        choice: Choice,
        policy: Planning,
        batch: RolloutBatch,
        loss: Loss,
        router: RouterLoss | None,
    ) -> Choice:
        ranks = self.group.ranks
        own = contents_of(batch, [entry.plan for entry in choice.compared], ())
        check_same_batches(ranks.exchange(own), ranks.global_ranks, ranks.batches)
        return super().choice(choice, policy, batch, loss, router)

    def strategies(self, strategies: MemoryStrategies) -> MemoryStrategies:
        """The first alone: a rank whose memory runs out has left the others in collectives."""
        return MemoryStrategies(strategies.reference[:1], strategies.dense[:1])

    def elements(self, name: str, parameter: nn.Parameter) -> int:
        return self.parts.elements(name, parameter)

    def copy_in(
        self, model: nn.Module, blocks: nn.ModuleList, dtype: torch.dtype, *, streamed: bool
    ) -> tuple[nn.Module, nn.ModuleList]:
        assert not streamed
        return self.parts.copy_in(model, blocks, dtype)

    def total(self, found: DenseRun, model: nn.Module, dtype: torch.dtype) -> DenseRun:
        for name in sorted(self.parts.summed):
            gradient = found.gradients[name]
            if gradient is not None:
                dist.all_reduce(gradient, group=self.parts.group)
        return super().total(found, model, dtype)

    def lengths(self, own: dict[str, float]) -> dict[str, float]:
        every = self.group.ranks.exchange({name: value**2 for name, value in own.items()})
        return lengths_of_parts([every[rank] for rank in self._copy], self.parts.split)

    def _shape(self, name: str, parameter: nn.Parameter) -> torch.Size:
        return self.parts.shapes[name]

    def _own(self, name: str, gradient: Tensor) -> Tensor:
        return self.parts.part(name, gradient)


def rank_comm(group: Distributed | None, model: nn.Module, loss: Loss) -> SingleProcess:
    """The comparison of the ranks that hold the model.

    Raises UnsupportedError for losses that are computed from all ranks' log-probs.
    """
    if group is None:
        return SingleProcess()
    if loss.across_ranks:
        raise UnsupportedError(
            f"{loss!r} gathers the log-probs of all ranks (across_ranks), which ordinary training "
            "on each rank, with which verify compares, does not. Verify it in one process, with a "
            "model of the same shape and few layers if need be."
        )
    if group.topology.splits_modules:
        return TensorParallel(group, model, mean=is_own(loss))
    return DataParallel(group, mean=is_own(loss))


def _split(found: DenseRun, model: nn.Module) -> tuple[dict[str, Tensor], dict[Tensor, Tensor]]:
    """Gradients that a loss gives to parameters of the model itself, where a copy of it ran, by
    name; and those of leaves that are none."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    direct = {names[leaf]: grad for leaf, grad in found.besides.items() if leaf in names}
    return direct, {leaf: grad for leaf, grad in found.besides.items() if leaf not in names}


def _cannot(rank: int, text: str) -> RankError:
    return RankError(f"rank {rank} cannot compare, so no rank does: {text} Nothing was changed.")


class _Gradients(Mapping[str, Tensor | None]):
    """Gradients of a model, of each what this rank has, when it is asked for, which is collective;
    and others, which are this rank's own."""

    def __init__(
        self,
        model: nn.Module,
        own: Callable[[str, Tensor], Tensor],
        others: Mapping[str, Tensor | None],
    ) -> None:
        self._parameters = dict(model.named_parameters())
        self._own = own
        self._others = others

    def __getitem__(self, name: str) -> Tensor | None:
        if name in self._others:
            return self._others[name]
        gradient = self._parameters[name].grad
        return None if gradient is None else self._own(name, gradient)

    def __iter__(self) -> Iterator[str]:
        yield from self._parameters
        yield from self._others

    def __len__(self) -> int:
        return len(self._parameters) + len(self._others)
