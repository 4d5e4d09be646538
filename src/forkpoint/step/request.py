"""Typed values that pass between the stages of a step (step/run.py)."""

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
    """A policy as the stages of a step see it: see `forkpoint.Policy`."""

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
    """One call of a policy: its arguments, before they are checked."""

    training: ClassVar[bool] = True
    """Whether forwards record a graph."""
    scores: ClassVar[bool] = False
    """Whether forwards alone run."""
    announced: ClassVar[bool] = True
    """Whether `Policy.last_step` and notes on exceptions tell what became of the gradients."""

    batch: Rollouts
    plan: Plan | None = None
    """The one that the caller gave, if any."""
    router: RouterLoss | None = None
    expert_counts: bool = False
    """Whether experts are counted without a router loss too."""

    @property
    def exchanges(self) -> bool:
        """Whether ranks may exchange prompts that several of them have."""
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
    """A step that `verify` compares: it is no step of the user's."""

    announced: ClassVar[bool] = False

    replay: RouteReplay | None = None
    """Experts that routers are forced to choose; None: those that the batch has, if any."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreRequest(Request):
    """A call of `score`, or of `logprobs` without gradients."""

    training: ClassVar[bool] = False
    scores: ClassVar[bool] = True
    announced: ClassVar[bool] = False

    entropy: bool = False


class LogprobsRequest(ScoreRequest):
    """A call of `logprobs` whose values are to be differentiated: a backward may follow."""

    training: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, eq=False)
class BackwardRequest(Request):
    """The backward of a call of `logprobs`, with its batch and plan."""

    first: FirstHalf
    weights: Mapping[str, Tensor | None]
    """Gradients by name of the values, [T] each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalStep:
    """This rank's step: a request that was checked, and its plans."""

    request: Request
    batch: RolloutBatch
    plans: tuple[Plan, ...]
    """One plan. On stages of a pipeline one for each size, from which ranks choose."""
    call: str
    """The call, with the options that must be the same on every rank."""
    checked: CheckedModel | None = None
    """The model in its present state, if it may be compared with its stock forward."""
    loss: Loss | None = None
    scale: float = 1.0
    routers: RouterWork | None = None
    settings: Computation | None = None
    """Of the model; only if a backward may follow."""
    factors: tuple[float, ...] = ()
    """Numbers that must agree between ranks with the same batch, up to rounding."""

    @property
    def plan(self) -> Plan:
        """The plan of one device."""
        return self.plans[0]

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over ranks: each has a loss by itself."""
        return self.loss is None or is_own(self.loss)

    @property
    def router_demand(self) -> RouterDemand | None:
        """The demands of router statistics on the plan."""
        return None if self.routers is None else self.routers.demand(scored=self.request.scores)


@dataclass(frozen=True, kw_only=True, eq=False)
class AgreedStep:
    """The step that runs, on which ranks have agreed."""

    local: LocalStep
    plan: Plan
    program: Program
    """The instructions that run."""
    ranks: RankStep
    sample: RolloutBatch | None
    """Rollouts to compare the model on; None if that is not due."""
    denominators: Denominators | None = None
    """Counts of all ranks' rollouts, if they share a loss; None: this rank's are taken."""
    statistics: StatisticsOfRanks | None = None
    """Of routers, over all ranks."""
    exchange: PromptExchange | None = None
    encoders: CommonEncoders | None = None
    """Encoder runs of ranks in lockstep; None where no rank waits for those of another batch."""
    gather: Gather | None = None
    """How sharded weights are held."""
