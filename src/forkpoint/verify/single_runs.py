"""Runs of single rollouts: ordinary training, and the reference in higher precision."""

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.engine.gradients import twins
from forkpoint.engine.route_replay import ForcedRoutes
from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.libraries import routers_of, stock_of, whole_copy
from forkpoint.hosts.modules import forget_lists
from forkpoint.hosts.routers import routers_of_copy
from forkpoint.losses.base import Denominators, Loss
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.router_steps import RouterWork
from forkpoint.verify.dense import DenseRouters, DenseRun, dense_run
from forkpoint.verify.memory import PLAIN, SMALL, STREAMED, MemoryStrategy, has_room, run_in_memory
from forkpoint.verify.ranks import RankComm
from forkpoint.verify.routes import HeldRoutes

Copy = tuple[nn.Module, Sequence[nn.Module]]
"""A copy of the model, and its blocks."""


@dataclass(frozen=True, eq=False)
class SingleRuns:
    """The runs of one comparison."""

    host: ModelHost
    comm: RankComm
    batch: RolloutBatch
    loss: Loss
    denominators: Denominators
    """Counts over all ranks that the loss's means are taken over."""
    routed: RouterWork | None
    last_tokens: bool
    """Whether rollouts' last tokens run."""
    held: HeldRoutes
    changes: Changes

    def run(
        self, dtype: torch.dtype, *, is_reference: bool
    ) -> tuple[DenseRun, ForcedRoutes | None]:
        """Run the model densely in `dtype`. Gradients of the reference are in the host's memory.

        Where memory runs out, the run is repeated in ways that take less.
        """
        run = _Run(self, dtype, is_reference)
        found, routes = self.comm.run(partial(run_in_memory, run.strategies, run.attempt, run.undo))
        run.end()
        found = self.comm.total(found, self.host.model, dtype)
        if is_reference:
            for name, gradient in found.gradients.items():
                if gradient is not None:
                    found.gradients[name] = gradient.cpu()
            if self.host.device.type == "cuda":
                gc.collect()  # the copy, whose modules refer to one another
                torch.cuda.empty_cache()
        return found, routes


class _Run:
    """One run, which may be repeated in less memory."""

    def __init__(self, runs: SingleRuns, dtype: torch.dtype, is_reference: bool) -> None:
        """Collective where ranks hold parts of the model: all copy it together, and before anything
        can fail on one."""
        self._runs, self._dtype, self._is_reference = runs, dtype, is_reference
        self._mark = runs.changes.mark
        self._is_wider = dtype != runs.host.compute_dtype
        self.strategies: tuple[MemoryStrategy, ...] = self._choose_strategies()
        self._copy = None if runs.comm.whole else self._copied(self.strategies[0].streamed)

    def _choose_strategies(self) -> tuple[MemoryStrategy, ...]:
        """Ways to run that take less and less memory."""
        host, routed, whole = self._runs.host, self._runs.routed, self._runs.comm.whole
        copies = self._is_reference and (self._is_wider or not whole)
        found = (PLAIN, SMALL, STREAMED) if copies and whole else (PLAIN, SMALL)
        if copies and not has_room(host.model, self._dtype, host.device):
            found = (STREAMED,)
        # Ranks exchange counts of experts once in a run.
        return found[-1:] if routed is not None and routed.on_ranks else found

    def attempt(self, strategy: MemoryStrategy) -> tuple[DenseRun, ForcedRoutes | None]:
        """Run all rollouts of this rank."""
        host, changes = self._runs.host, self._runs.changes
        model, blocks = host.model, host.blocks
        if self._copy is not None:
            model, blocks = self._copy
        elif self._is_wider:
            model, blocks = self._copied(strategy.streamed)
        if self._is_reference and model is not host.model:
            stock_of(model).compute_in(self._dtype, changes)
        strategy.apply(blocks, host.device, changes)
        autocast = torch.autocast(host.device.type, enabled=False)
        with autocast if self._is_reference else nullcontext():
            routes = self._runs.held.run(model, record=self._is_reference)
            return self._train(model, routes, strategy), routes

    def undo(self) -> None:
        """Put the model back after an attempt."""
        self._runs.changes.undo(self._mark)
        forget_lists()  # which would keep the copy alive until the end

    def end(self) -> None:
        """Put the model back after the last attempt, and drop its copy."""
        self._copy = None
        self.undo()

    def _copied(self, streamed: bool) -> Copy:
        host = self._runs.host
        return whole_copy(
            host.model,
            host.blocks,
            self._dtype,
            streamed=streamed,
            splits=host.group.splits,
            links=host.links,
        )

    def _train(
        self, model: nn.Module, routes: ForcedRoutes | None, strategy: MemoryStrategy
    ) -> DenseRun:
        """Run rollouts one at a time, without forkpoint's code."""
        runs, host, routed, routers = self._runs, self._runs.host, self._runs.routed, None
        if routed is not None:
            found = host.routers.found
            routers = DenseRouters(
                routers_of(model) if runs.comm.staged else routers_of_copy(found, model),
                routed.terms,
                runs.changes,
                last_token=runs.last_tokens,
                joins=routed.joins,
                gather=runs.comm.gather if routed.on_ranks else None,
            )
        if not len(runs.batch):
            nothing = torch.zeros(0, dtype=host.loss_dtype, device=host.device)
            if routers is not None:
                routers.counted()
            none: dict[str, Tensor | None] = {name: None for name, _ in model.named_parameters()}
            return DenseRun(0.0, {host.head: nothing}, none, routers and routers.value())
        with Changes() as changes:
            if model is host.model and host.topology.listens:
                twins(model, [p for p in model.parameters() if p.requires_grad], changes)
            return dense_run(
                model,
                runs.batch,
                runs.loss,
                runs.denominators,
                None if routes is None else routes.at,
                head_tokens=strategy.head_tokens,
                routers=routers,
            )
