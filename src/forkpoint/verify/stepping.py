"""The policy whose steps `verify` compares, as far as it needs to know it."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from forkpoint.engine.guard import Step
from forkpoint.engine.host import Host
from forkpoint.hosts.routes import Observed
from forkpoint.losses.base import Denominators, Loss, LossFunction
from forkpoint.losses.router import RouterLoss
from forkpoint.plan.plan import Plan
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.verify.plans import Planning


class StepFigures(Protocol):
    """The parts of a step that are compared: see `forkpoint.StepStats`."""

    @property
    def loss(self) -> float: ...
    @property
    def router_loss(self) -> float | None: ...
    @property
    def per_token(self) -> Mapping[str, Tensor]: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def logical_tokens(self) -> int: ...
    @property
    def computed_tokens(self) -> int: ...


class Stepping(Planning, Observed, Protocol):
    """A policy whose steps are compared: see `forkpoint.Policy`."""

    @property
    def host(self) -> Host: ...
    def with_config(self, **changes: object) -> "Stepping": ...
    def forward_backward(
        self,
        batch: RolloutBatch,
        loss: Loss | LossFunction,
        *,
        denominators: Denominators | None = None,
        scale: float = 1.0,
        plan: Plan | None = None,
        router: RouterLoss | None = None,
    ) -> StepFigures: ...
    def _run_step(
        self,
        step: Step,
        batch: RolloutBatch,
        loss: Loss,
        denominators: Denominators | None,
        scale: float,
        plan: Plan | None,
        *,
        announced: bool,
        routers: tuple[RouterLoss | None, Tensor | None, bool] = ...,
    ) -> StepFigures: ...
