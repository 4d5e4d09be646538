"""The policy whose steps `verify` compares, as far as it needs to know it."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from forkpoint.hosts.routes import Observed
from forkpoint.plan.plan import Plan
from forkpoint.step.request import StepPolicy
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


class Stepping(Planning, Observed, StepPolicy, Protocol):
    """A policy whose steps are compared: see `forkpoint.Policy`."""

    def with_config(self, **changes: object) -> "Stepping": ...
