"""Real optimizer steps over frozen batches: shared and, from the same state, dense beside it.

The dense side is a policy too, with sharing none: rollouts packed into microbatches, the same head,
    kernels and loss. What differs is only that tokens are computed once.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from forkpoint.apps.replay.batches import Batches, GroupBatches, StepInput
from forkpoint.apps.replay.checkpoint import Checkpoints, digest_of
from forkpoint.apps.replay.difference import parameter_difference
from forkpoint.apps.replay.experts import ExpertLoads, GivenRoutes
from forkpoint.apps.replay.folder import ReplayFolder
from forkpoint.apps.replay.ranks import RankGroup, check_same, clip, full_tensor, placed, ranks_of
from forkpoint.apps.replay.rates import Rate
from forkpoint.apps.replay.records import ReplayReport, ReplayStep, StepRecord
from forkpoint.config import AUTO, Config
from forkpoint.engine.host import Host
from forkpoint.engine.memory import measured_budget
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.losses.base import Loss, LossFunction, as_loss
from forkpoint.losses.router import RouterLoss
from forkpoint.plan import Plan
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.results import StepStats
from forkpoint.step.router_steps import router_work
from forkpoint.wrapping import wrap

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def replay(
    model: nn.Module,
    batches: RolloutBatch | Batches,
    loss: Loss | LossFunction,
    *,
    optimizer: MakeOptimizer,
    steps: int,
    groups_per_step: int = 1,
    baseline: bool = True,
    config: Config | None = None,
    rate: Rate | None = None,
    max_grad_norm: float | None = None,
    router: RouterLoss | None = None,
    expert_counts: bool = False,
    folder: ReplayFolder | None = None,
    checkpoint_every: int | None = None,
    about: Mapping[str, Any] | None = None,
    on_step: Callable[[ReplayStep], None] | None = None,
    on_resume: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Train on frozen batches, cycling through them, and measure every step.

    Args:
        model: a supported model, which is trained; with a baseline, a copy of it is trained too.
        batches: what step i trains on, such as the batches of a trace (`TraceBatches`). Of one
            batch of rollouts, step i takes the `groups_per_step` groups that follow those of step
            i - 1.
        loss: one of `forkpoint.losses`, or a function of (outputs, batch).
        optimizer: makes an optimizer of a list of parameters; called once for each model.
        steps: how many optimizer steps.
        groups_per_step: how many groups of one batch of rollouts make the batch of one step.
        baseline: whether to train dense as well. Dense gets the best plan without sharing under the
            limits of `config`. Which of the two goes first alternates from step to step.
        config: how batches are planned and run.
        rate: what the optimizer's learning rates are multiplied by at each step; None leaves them.
        max_grad_norm: gradients of a larger norm are scaled down to it, on both sides.
        router: an auxiliary loss of a mixture's routers, on both sides. A scope that is a list is
            of the rollouts of each step.
        expert_counts: whether experts are counted without a router loss; then tokens run for it as
            `Policy.forward_backward` says.
        folder: where rows and checkpoints are written, and from where a replay is resumed; on
            several ranks one that all of them see.
        checkpoint_every: after how many steps the state of both sides is saved; it is saved after
            the last step in any case. Needs a folder.
        about: what the folder's manifest says besides, such as the command; ready for JSON.
        on_step: called after each step that this run makes.
        on_resume: called once with the number of steps done before, where this run resumes.

    Raises:
        ConfigError: fewer groups than `groups_per_step`, a count below 1, or a folder that holds
            another replay than this one; what differs is named.
        UnsupportedError: a baseline on several ranks.
        RankError: another rank fails, which it names.

    A model that torch's fully_shard holds on several ranks is trained on all of them: every rank
    calls this with the same arguments, and each step's rollouts are placed by `forkpoint.place`.

    Otherwise as `Policy.forward_backward`; what can be checked is checked before the first step.
    """
    config, loss, rate = config or Config(), as_loss(loss), rate or Rate()
    if baseline and any(isinstance(module, FSDPModule) for module in model.modules()):
        raise UnsupportedError(
            "a baseline trains a copy of the model, and fully_shard's models are not copied. "
            "Replay without a baseline on several ranks, or on one without fully_shard."
        )
    _check_counts(steps=steps, checkpoint_every=checkpoint_every)
    if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
        raise ConfigError(f"max_grad_norm is {max_grad_norm}; it takes a finite number above 0.")
    if checkpoint_every is not None and folder is None:
        raise ConfigError(
            f"checkpoint_every is {checkpoint_every}, and there is no folder to save in; give one."
        )
    if isinstance(batches, RolloutBatch):
        batches = GroupBatches(batches, groups_per_step)
    routers = _Routers(router, expert_counts)
    dense, start = None, []
    if baseline:
        dense_config = replace(config, sharing="none", boundary="auto", leaf_layout="packed")
        dense = _Side(copy.deepcopy(model), dense_config, optimizer, rate, max_grad_norm, routers)
        start = [_on_host(parameter) for parameter in model.parameters()]
    shared = _Side(model, config, optimizer, rate, max_grad_norm, routers)
    ranks = ranks_of(shared.policy)
    sides = {"shared": shared} | ({} if dense is None else {"dense": dense})
    same = {"batches": batches.describe(), "loss": _named(loss), "rate": rate, "config": config}
    same |= {"steps": steps, "max_grad_norm": max_grad_norm, "folder": folder and folder.path}
    same |= {"router": router, "expert_counts": expert_counts}
    check_same(ranks, {**same, "checkpoint_every": checkpoint_every})
    _set_budgets(list(sides.values()), config, folder, ranks)
    loss.check_head(shared.policy.host.head)
    for part in batches.every():
        loss.check(part)
        shared.policy.host.check(part, training=True, routed=router is not None)
    routers.check(shared.policy.host, batches, steps)

    with nullcontext() if folder is None else closing(folder):
        done: list[ReplayStep] = []
        checkpoints: Checkpoints | None = None
        if folder is not None:
            fixed = {
                "batches": batches.describe(),
                "model": _model_facts(shared),
                "loss": _named(loss),
                "optimizer": {"kind": type(shared.optimizer).__name__, **shared.optimizer.defaults},
                "rate": asdict(rate),
                "max_grad_norm": max_grad_norm,
                "steps": steps,
                "baseline": baseline,
                "config": asdict(config),
                **routers.facts(),
                "runs_on": _runs_on(shared.policy.host)
                # Plans are chosen by these, and another order of work rounds otherwise.
                | {
                    "calibration": shared.policy.plan(
                        batches.at(0).batch, loss, router=router
                    ).rests_on,
                    "memory_budget_bytes": shared.policy.memory_budget_bytes,
                },
                **({"sharded": True} if ranks.is_sharded else {}),
            }
            trained = {name: (side.model, side.optimizer) for name, side in sides.items()}
            checkpoints = Checkpoints(folder, trained, ranks)
            if ranks.first(lambda: folder.open(fixed, about or {})):
                done = checkpoints.restore()
                if done and on_resume is not None:
                    on_resume(len(done))
        resumed_at = len(done) or None

        for index in range(len(done), steps):
            given = batches.at(index)
            runs_all = config.all_logprobs or shared.routers.active
            mine = placed(ranks, given.batch, shared.policy, loss, runs_all=runs_all)
            given = replace(given, batch=mine)
            row, plans = _step(shared, dense, given, loss, index, start)
            row = replace(row, others=tuple(ranks.exchange(row.share)[1:]))
            done.append(row)
            if folder is not None and ranks.index == 0:
                folder.add_plans(row.fingerprint, given.batch, plans)
                folder.add_row(row.to_dict())
            is_last = index + 1 == steps
            is_due = checkpoint_every is not None and (index + 1) % checkpoint_every == 0
            if checkpoints is not None and (is_last or is_due):
                checkpoints.save(index + 1)
            if on_step is not None:
                on_step(row)
        return ReplayReport(steps=tuple(done), resumed_at=resumed_at)


def _set_budgets(
    sides: list["_Side"], config: Config, folder: ReplayFolder | None, ranks: RankGroup
) -> None:
    """Let all sides plan for the memory that is free for each, or that was when the replay began.

    Gradients and optimizers of all sides stay allocated while one of them runs.
    """
    device = sides[0].policy.host.device
    if config.memory_budget != AUTO or device.type != "cuda":
        return
    budget = None if folder is None else ranks.first(folder.memory_budget_bytes)
    if budget is None:
        parameters = [parameter for side in sides for parameter in side.parameters]
        budget = min(ranks.exchange(measured_budget(device, parameters, config)))
    for side in sides:
        side.policy.use_memory_budget(budget)


@dataclass(frozen=True)
class _Routers:
    """Statistics that both sides ask of a mixture's routers."""

    loss: RouterLoss | None
    counts: bool

    @property
    def active(self) -> bool:
        return self.loss is not None or self.counts

    def check(self, host: Host, batches: Batches, steps: int) -> None:
        """Refuse before the first step what `Policy.forward_backward` would refuse."""
        listed = self.loss is not None and not isinstance(self.loss.scope, str)
        # Lists are of the rollouts of a step.
        parts = (batches.at(n).batch for n in range(steps)) if listed else batches.every()
        for part in parts:
            router_work(host, part, self.loss, expert_counts=self.counts)

    def facts(self) -> dict[str, Any]:
        """Options that are set, for a replay to go on with the same."""
        facts: dict[str, Any] = {} if self.loss is None else {"router": asdict(self.loss)}
        return facts | ({"expert_counts": True} if self.counts else {})


class _Side:
    """A policy with its own optimizer."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        optimizer: MakeOptimizer,
        rate: Rate,
        max_grad_norm: float | None,
        routers: _Routers,
    ) -> None:
        self.routers = routers
        self.model = model
        self.policy: Policy = wrap(model, config)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer(self.parameters)
        self.rate, self.max_grad_norm = rate, max_grad_norm
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, given: StepInput, loss: Loss, index: int) -> tuple[StepRecord, Plan]:
        """Train once. The gradient's norm is taken with the clock stopped."""
        device = self.policy.host.device
        cuda = device.type == "cuda"
        factor = self.rate.factor(index)
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr * factor
        held = 0
        if cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        clock = _Clock(device)
        with clock:
            stats = self.policy.forward_backward(
                given.batch,
                loss,
                denominators=given.denominators,
                scale=given.scale,
                router=self.routers.loss,
                expert_counts=self.routers.counts,
            )
        norm = _gradient_norm(self.parameters)
        with clock:
            if self.max_grad_norm is not None:
                clip(self.parameters, self.max_grad_norm, norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        plan = stats.plan
        assert plan.shape is not None
        memory = stats.event_memory_bytes
        record = StepRecord(
            loss=stats.loss,
            gradient_norm=float(norm),
            ms=clock.ms,
            phase_ms=stats.phase_ms,
            events=stats.events,
            event_ms=stats.event_ms,
            event_memory_bytes=None if memory is None else tuple(n - held for n in memory),
            sharing=plan.sharing,
            boundary=plan.boundary,
            microbatches=len(plan.microbatches),
            computed_tokens=plan.computed_tokens,
            flops=plan.shared.step_flops(plan.shape),
            peak_memory_bytes=torch.cuda.max_memory_allocated(device) - held if cuda else None,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            router_loss=stats.router_loss,
            experts=_loads_of(stats),
            routes=_routes_of(stats),
        )
        return record, plan

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def _loads_of(stats: StepStats) -> ExpertLoads | None:
    logical_LE, computed_LE = stats.expert_counts, stats.computed_expert_counts
    if logical_LE is None or computed_LE is None:
        return None
    return ExpertLoads.of(logical_LE.tolist(), computed_LE.tolist())


def _routes_of(stats: StepStats) -> GivenRoutes | None:
    routes = stats.routes
    if routes is None:
        return None
    return GivenRoutes(
        decisions=tuple(routes.decisions_L.tolist()), elsewhere=tuple(routes.elsewhere_L.tolist())
    )


class _Clock:
    """Adds up the milliseconds of the blocks it is entered for, each begun and ended idle."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.ms, self.began = device, 0.0, 0.0

    def __enter__(self) -> None:
        self._wait()
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.ms += (time.perf_counter() - self.began) * 1e3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _step(
    shared: _Side,
    dense: _Side | None,
    given: StepInput,
    loss: Loss,
    index: int,
    start: list[Tensor],
) -> tuple[ReplayStep, dict[str, Plan]]:
    """Step `index` in both ways, and the plans that it ran."""
    other = dense_plan = None
    if dense is not None and index % 2 == 0:
        other, dense_plan = dense.step(given, loss, index)
    record, plan = shared.step(given, loss, index)
    if dense is not None and index % 2 == 1:
        other, dense_plan = dense.step(given, loss, index)
    assert plan.shape is not None
    row = ReplayStep(
        step=index + 1,
        fingerprint=plan.fingerprint,
        lr=shared.lr,
        rollouts=len(given.batch),
        logical_tokens=given.batch.logical_tokens,
        unique_tokens=plan.unique_tokens,
        left_out_tokens=plan.left_out.tokens,
        dense_flops=plan.dense.step_flops(plan.shape),
        shared=record,
        dense=other,
        difference=None
        if dense is None
        else parameter_difference(shared.model, dense.model, start),
    )
    return row, {"shared": plan} | ({} if dense_plan is None else {"dense": dense_plan})


def _on_host(parameter: nn.Parameter) -> Tensor:
    """A copy that takes no memory of the device, pinned where it is read back at each step."""
    copied = parameter.detach().cpu().clone()
    return copied.pin_memory() if parameter.is_cuda else copied


def _gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Summed in float64, whatever the gradients' dtype: 16 bits would hide what is compared."""
    norms = [
        full_tensor(torch.linalg.vector_norm(p.grad, dtype=torch.float64))
        for p in parameters
        if p.grad is not None
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.linalg.vector_norm(torch.stack(norms))


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it takes a whole number of at least 1.")


def _model_facts(side: _Side) -> dict[str, Any]:
    """Facts that must be the same for a replay to go on: sizes by name, and a digest."""
    config: Any = getattr(side.model, "config", None)
    return {
        "kind": type(side.model).__name__,
        "config": config.to_dict() if hasattr(config, "to_dict") else None,
        "training": side.model.training,
        "checkpointed": side.policy.host.shape.checkpointed,
        "initial_parameters": digest_of(
            (*side.model.named_parameters(), *side.model.named_buffers())
        ),
    }


def _named(loss: Loss) -> str:
    """A loss by its options; functions have no text that is the same in another process."""
    function = getattr(loss, "function", None)
    if function is not None:
        return f"function {getattr(function, '__qualname__', type(function).__qualname__)}"
    return repr(loss)


def _runs_on(host: Host) -> dict[str, Any]:
    """Settings that decide the last bit of a result, besides the numbers that go in."""
    device = host.device
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
