"""One comparison of `verify`: its arguments, what all its runs use, and the clock of its runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.engine.host import FoundRouter
from forkpoint.losses.base import Denominators, Loss
from forkpoint.losses.router import RouterLoss
from forkpoint.plan.pricing.cost import dense_work
from forkpoint.plan.runs import run_lengths
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.request import StepPolicy
from forkpoint.step.router_steps import RouterWork
from forkpoint.verify.dense import DenseRouters
from forkpoint.verify.memory import Needs
from forkpoint.verify.plans import Choice, Planning
from forkpoint.verify.progress import Clock, Run, VerifyProgress
from forkpoint.verify.ranks import Together
from forkpoint.verify.routes import HeldRoutes
from forkpoint.verify.ways import Ways

REFERENCE, DENSE = "reference", "dense"
"""Names of the runs of single rollouts."""


class Stepping(Planning, StepPolicy, Protocol):
    """A policy whose steps are compared: see `forkpoint.Policy`."""

    def with_config(self, **changes: object) -> "Stepping": ...


@dataclass
class Work:
    """One comparison: its arguments, and what all its runs use."""

    policy: Stepping
    batch: RolloutBatch
    loss: Loss
    denominators: Denominators
    given: Denominators | None
    """By the caller."""
    changes: Changes
    dtype: torch.dtype
    reference_dtype: torch.dtype
    joint: Together
    routed: RouterWork | None
    """Of the loss of routers; None where there is none."""
    others: tuple[Tensor, ...] = ()
    """Leaves that the loss reads and that are no parameters of the model, once the reference has
    run."""
    held: HeldRoutes = field(init=False)
    clock: Clock = field(init=False)

    @property
    def double(self) -> bool:
        """Whether the model is its own reference."""
        return self.dtype == torch.float64

    @property
    def router(self) -> RouterLoss | None:
        """The loss of routers."""
        return None if self.routed is None else self.routed.router

    @property
    def last_tokens(self) -> bool:
        """Whether rollouts' last tokens run."""
        return self.router is not None and self.router.last_token

    def dense_routers(self, model: nn.Module) -> DenseRouters | None:
        """The same loss in ordinary training of the model or of a copy of it."""
        if self.routed is None:
            return None
        host = self.policy.host
        names = {module: name for name, module in host.model.named_modules()}
        found = [names[router.module] for router in host.routers.found]
        return DenseRouters(
            [FoundRouter(name, model.get_submodule(name)) for name in found],
            self.routed.terms,
            self.changes,
            last_token=self.last_tokens,
            joins=self.routed.joins,
            gather=self.joint.gather if self.routed.on_ranks else None,
        )


def clock_of(
    work: Work,
    choice: Choice,
    needs: Needs,
    room: int | None,
    ways: Ways,
    keeps: bool,
    progress: Callable[[VerifyProgress], None] | None,
) -> Clock:
    """The runs to come, with their work and their memory."""
    shape = work.policy.host.shape
    # Ordinary training runs all tokens of rollouts that are trained.
    edges = run_lengths(work.batch, whole=True, last_tokens=work.last_tokens)
    dense = dense_work(edges, work.batch.trained_tokens, shape.windows)
    runs = []
    own = () if work.double else ((DENSE, work.dtype, ways.dense[0]),)
    for name, dtype, way in ((REFERENCE, work.reference_dtype, ways.reference[0]), *own):
        # Log-probs first, then forwards with a graph.
        forwards = 2 if way.checkpointed else 1
        flops = dense.step_flops(shape) + forwards * dense.forward_flops(shape)
        runs.append(Run(name, flops, dtype))
    for entry in choice.compared:
        plan = entry.plan
        scores = plan.shared.forward_flops(shape) if plan.program.has_scores else 0.0
        runs.append(Run(entry.kind, plan.shared.step_flops(shape) + scores, work.dtype))
    kept = needs.gradients if keeps else 0
    memory = max(
        needs.reference(ways.reference[0]),
        kept + needs.dense(ways.dense[0]) if own else 0,
        kept + needs.own_gradients + choice.peak_bytes,
    )
    texts = {ways.reference[0].text(), *(way.text() for way in ways.dense[: len(own)])}
    text = ", ".join(sorted(texts - {"plain"})) or "plain"
    return Clock(
        runs, work.policy.host.device, progress, memory_bytes=memory, free_bytes=room, ways=text
    )
