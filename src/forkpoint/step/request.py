"""Values that are passed between the stages of a step (step/run.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from forkpoint.config import Config, Gather
from forkpoint.engine.prompt_exchange import PromptExchange
from forkpoint.engine.route_replay import RouteReplay
from forkpoint.engine.transaction import StepOutcome
from forkpoint.hosts.fingerprint import Computation
from forkpoint.hosts.host import ModelHost
from forkpoint.losses.base import Denominators, Loss, LossFunction, is_own
from forkpoint.losses.router import RouterLoss
from forkpoint.parallel.statistics import StatisticsOfRanks
from forkpoint.parallel.step import RankStep
from forkpoint.plan import Plan
from forkpoint.plan.media import CommonEncoders
from forkpoint.plan.program import Program
from forkpoint.plan.routing import RouterDemand
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.step.differentiable import FirstHalf
from forkpoint.step.router_steps import RouterWork
from forkpoint.step.self_check import CheckedModel
from forkpoint.step.state import ModelState

Rollouts = RolloutBatch | Sequence[Rollout]
"""Argument of a policy's calls: a batch, or the rollouts of one."""


class StepPolicy(Protocol):
    """The interface of a policy to the stages of a step: see `forkpoint.Policy`."""

    last_step: StepOutcome | None

    @property
    def host(self) -> ModelHost: ...
    @property
    def config(self) -> Config: ...
    @property
    def model_state(self) -> ModelState: ...
    def plan(
        self, batch: RolloutBatch, loss: Loss | None = None, *, router: RouterLoss | None = None
    ) -> Plan: ...
    def with_config(self, **changes: object) -> "StepPolicy": ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A call of a policy: its unchecked arguments."""

    training: ClassVar[bool] = True
    """Whether forwards record a graph."""
    scores: ClassVar[bool] = False
    """Whether only forwards run."""
    announced: ClassVar[bool] = True
    """Whether the outcome for gradients is reported in `Policy.last_step` and in notes on
    exceptions."""

    batch: Rollouts
    plan: Plan | None = None
    """The caller's plan, if any."""
    router: RouterLoss | None = None
    expert_counts: bool = False
    """Whether experts are counted even without a router loss."""

    @property
    def exchanges(self) -> bool:
        """Whether ranks may exchange common prompts."""
        return False


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainRequest(Request):
    """A call of `forward_backward`: see there for the fields."""

    loss: Loss | LossFunction
    denominators: Denominators | None = None
    scale: float = 1.0
    router_counts: Tensor | None = None

    @property
    def exchanges(self) -> bool:
        return self.router is None and not self.expert_counts


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedRequest(TrainRequest):
    """A step that `verify` compares. It is not reported as a step of the user."""

    announced: ClassVar[bool] = False

    replay: RouteReplay | None = None
    """Experts that routers are forced to choose; None: those of the batch, if any."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreRequest(Request):
    """A call of `score`, or of `logprobs` without gradients."""

    training: ClassVar[bool] = False
    scores: ClassVar[bool] = True
    announced: ClassVar[bool] = False

    entropy: bool = False


class LogprobsRequest(ScoreRequest):
    """A call of `logprobs` with gradients: a backward may follow."""

    training: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, eq=False)
class BackwardRequest(Request):
    """The backward of a call of `logprobs`, with its batch and plan."""

    first: FirstHalf
    weights: Mapping[str, Tensor | None]
    """Gradients [T] with respect to the values, by name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalStep:
    """This rank's step: a checked request, and its plans."""

    request: Request
    batch: RolloutBatch
    plans: tuple[Plan, ...]
    """One plan; on stages of a pipeline, one for each size, from which ranks choose."""
    call: str
    """The call, with the options that must be the same on every rank."""
    checked: CheckedModel | None = None
    """The model in its present state, for self-checks; None if they are disabled."""
    loss: Loss | None = None
    scale: float = 1.0
    routers: RouterWork | None = None
    settings: Computation | None = None
    """Settings of the model, if a backward may follow."""
    factors: tuple[float, ...] = ()
    """Numbers that must agree between ranks with the same batch, up to rounding."""

    @property
    def plan(self) -> Plan:
        """The plan, without stages of a pipeline."""
        return self.plans[0]

    @property
    def averages(self) -> bool:
        """Whether each rank has a separate loss, whose gradients are averaged over ranks."""
        return self.loss is None or is_own(self.loss)

    @property
    def router_demand(self) -> RouterDemand | None:
        """The demands of router statistics on the plan."""
        return None if self.routers is None else self.routers.demand(scored=self.request.scores)


@dataclass(frozen=True, kw_only=True, eq=False)
class AgreedStep:
    """The step on which ranks have agreed."""

    local: LocalStep
    plan: Plan
    program: Program
    """Instructions of the step."""
    ranks: RankStep
    sample: RolloutBatch | None
    """Sample for a self-check; None if none is due."""
    denominators: Denominators | None = None
    """Denominators of all ranks' rollouts, if ranks share a loss; None: those of this rank."""
    statistics: StatisticsOfRanks | None = None
    """Statistics of routers over all ranks."""
    exchange: PromptExchange | None = None
    encoders: CommonEncoders | None = None
    """Encoder runs of ranks in lockstep; None if no rank waits for those of another batch."""
    gather: Gather | None = None
    """How often sharded weights are gathered."""
