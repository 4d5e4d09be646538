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

        Where memory runs out, the run is repeated in ways that take less. Collective where ranks
        hold parts of the model: all copy it together, and before anything can fail on one.
        """
        host, mark, whole = self.host, self.changes.mark, self.comm.whole
        is_wider = dtype != host.compute_dtype
        strategies = self._strategies(dtype, copies=is_reference and (is_wider or not whole))

        def copied(streamed: bool) -> tuple[nn.Module, Sequence[nn.Module]]:
            return whole_copy(
                host.model,
                host.blocks,
                dtype,
                streamed=streamed,
                splits=host.group.splits,
                links=host.links,
            )

        joined = [] if whole else [copied(strategies[0].streamed)]

        def attempt(strategy: MemoryStrategy) -> tuple[DenseRun, ForcedRoutes | None]:
            model, blocks = host.model, host.blocks
            if joined:
                model, blocks = joined[0]
            elif is_wider:
                model, blocks = copied(strategy.streamed)
            if is_reference and model is not host.model:
                stock_of(model).compute_in(dtype, self.changes)
            strategy.apply(blocks, host.device, self.changes)
            autocast = torch.autocast(host.device.type, enabled=False)
            with autocast if is_reference else nullcontext():
                routes = self.held.run(model, record=is_reference)
                return self._train(model, routes, strategy), routes

        def undo() -> None:
            self.changes.undo(mark)
            forget_lists()  # which would keep the copy alive until the end

        found, routes = self.comm.run(partial(run_in_memory, strategies, attempt, undo))
        joined.clear()
        undo()
        found = self.comm.total(found, host.model, dtype)
        if is_reference:
            for name, gradient in found.gradients.items():
                if gradient is not None:
                    found.gradients[name] = gradient.cpu()
            if host.device.type == "cuda":
                gc.collect()  # the copy, whose modules refer to one another
                torch.cuda.empty_cache()
        return found, routes

    def _strategies(self, dtype: torch.dtype, *, copies: bool) -> tuple[MemoryStrategy, ...]:
        """Ways to run that take less and less memory. `copies`: whether the model is copied."""
        found = (PLAIN, SMALL, STREAMED) if copies and self.comm.whole else (PLAIN, SMALL)
        if copies and not has_room(self.host.model, dtype, self.host.device):
            found = (STREAMED,)
        # Ranks exchange counts of experts once in a run.
        return found[-1:] if self.routed is not None and self.routed.on_ranks else found

    def _train(
        self, model: nn.Module, routes: ForcedRoutes | None, strategy: MemoryStrategy
    ) -> DenseRun:
        """Run rollouts one at a time, without forkpoint's code."""
        host, routed, routers = self.host, self.routed, None
        if routed is not None:
            found = host.routers.found
            routers = DenseRouters(
                routers_of(model) if self.comm.staged else routers_of_copy(found, model),
                routed.terms,
                self.changes,
                last_token=self.last_tokens,
                joins=routed.joins,
                gather=self.comm.gather if routed.on_ranks else None,
            )
        if not len(self.batch):
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
                self.batch,
                self.loss,
                self.denominators,
                None if routes is None else routes.at,
                head_tokens=strategy.head_tokens,
                routers=routers,
            )
