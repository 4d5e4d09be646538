"""Optimizer steps on recorded batches: shared and, from the same initial state, dense.

The dense side is a policy with sharing="none": rollouts packed into microbatches, with the same
head, kernels and loss. The only difference is that the shared side computes each shared token once.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from forkpoint.apps.replay.batches import Batches, GroupBatches, StepInput
from forkpoint.apps.replay.folder import ReplayFolder, digest_of
from forkpoint.apps.replay.records import ParameterDifference, ReplayReport, ReplayStep, StepRecord
from forkpoint.config import AUTO, Config
from forkpoint.engine.memory import measured_budget
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.hosts.libraries import library_of
from forkpoint.hosts.topology import unwrapped
from forkpoint.hosts.wrappers import uncompiled
from forkpoint.losses.base import Loss, LossFunction, as_loss
from forkpoint.losses.router import RouterLoss
from forkpoint.plan import Plan
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.step.router_steps import router_work
from forkpoint.wrapping import wrap

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
CHUNK_ELEMENTS = 1 << 24
"""Number of parameter elements that are compared in float64 at a time."""


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
    max_grad_norm: float | None = None,
    router: RouterLoss | None = None,
    output: Path | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    about: Mapping[str, Any] | None = None,
    on_step: Callable[[ReplayStep], None] | None = None,
    on_resume: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Train on recorded batches, and measure every step. Steps start again after the last batch.

    Args:
        model: a supported model. It is trained; with a baseline a copy of it is trained too.
        batches: the batches of the steps (`TraceBatches`), or one batch of rollouts. Each step
            takes the next `groups_per_step` groups of that batch.
        loss: one of `forkpoint.losses`, or a function of (outputs, batch).
        optimizer: makes an optimizer from a list of parameters. It is called once for each model.
        steps: number of optimizer steps.
        groups_per_step: number of groups in the batch of a step, for one batch of rollouts.
        baseline: whether to train dense as well. Dense gets the best plan without sharing under the
            limits of `config`. The order of the two alternates between steps.
        config: options of planning and running.
        max_grad_norm: largest norm of the gradients. Larger gradients are scaled down to it, on
            both sides.
        router: a router loss, for both sides. A scope that is a list refers to the rollouts of each
            step.
        output: a folder, new or empty, in which rows and checkpoints are written.
        resume: whether to continue the replay in `output` from its last checkpoint, or to start it
            if there is none. Only one process may write to a folder.
        checkpoint_every: number of steps between checkpoints of both sides. The state after the
            last step is always saved. Needs `output`.
        about: further entries of the manifest, such as the command, as JSON values.
        on_step: callback after each step of this run.
        on_resume: callback with the number of earlier steps, if the run resumes.

    Raises:
        ConfigError: fewer groups than `groups_per_step`, a count below 1, or a folder with another
            replay (the message names the differences).
        UnsupportedError: several ranks hold the model, or it is a stage of a pipeline.

    Otherwise the errors of `Policy.forward_backward`, before the first step where possible.
    """
    config, loss = config or Config(), as_loss(loss)
    _refuse_ranks(model)
    _check_options(steps, max_grad_norm, checkpoint_every)
    if output is None and (resume or checkpoint_every is not None):
        raise ConfigError(
            f"{'resume' if resume else 'checkpoint_every'} is set, and output is None; it needs a "
            "folder. Give output (--output)."
        )
    folder = None if output is None else ReplayFolder(output, resume=resume)
    if isinstance(batches, RolloutBatch):
        batches = GroupBatches(batches, groups_per_step)
    start = [_on_host(parameter) for parameter in model.parameters()] if baseline else []
    sides: dict[str, _Side] = {}
    if baseline:
        plain = replace(config, sharing="none", boundary="auto")
        sides["dense"] = _Side(copy.deepcopy(model), plain, optimizer, router)
    shared = sides["shared"] = _Side(model, config, optimizer, router)
    policy = shared.policy
    # Inputs that determine the results. They must be equal when the replay resumes.
    fixed: dict[str, Any] = {
        "batches": batches.describe(),
        "loss": repr(loss),
        "max_grad_norm": max_grad_norm,
        "steps": steps,
        "baseline": baseline,
        "config": asdict(config),
        **({} if router is None else {"router": asdict(router)}),
    }
    _set_budgets(list(sides.values()), config, folder)
    prices = _set_prices(list(sides.values()), config, folder)
    _check_batches(policy, batches, loss, router, steps)

    done: list[ReplayStep] = []
    trained = {name: (side.model, side.optimizer) for name, side in sides.items()}
    if folder is not None:
        fixed |= _facts(shared)
        # These determine the plans, whose order of work affects rounding.
        fixed["runs_on"] |= {
            "calibration": policy.plan(batches.at(0).batch, loss, router=router).rests_on,
            "memory_budget_bytes": policy.memory_budget_bytes,
        }
        folder.open(fixed, about or {}, prices)
        done = folder.restore(trained)
        if done and on_resume is not None:
            on_resume(len(done))
    resumed_at = len(done) or None

    for index in range(len(done), steps):
        row = _train_once(sides, index, batches.at(index), loss, max_grad_norm, start)
        done.append(row)
        if folder is not None:
            folder.add_row(row)
            if index + 1 == steps or (index + 1) % (checkpoint_every or steps) == 0:
                folder.save(done, trained)
        if on_step is not None:
            on_step(row)
    return ReplayReport(steps=tuple(done), resumed_at=resumed_at)


def _check_options(steps: int, max_grad_norm: float | None, checkpoint_every: int | None) -> None:
    for name, value in (("steps", steps), ("checkpoint_every", checkpoint_every)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it takes a whole number of at least 1.")
    if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
        raise ConfigError(f"max_grad_norm is {max_grad_norm}; it takes a finite number above 0.")


def _check_batches(
    policy: Policy, batches: Batches, loss: Loss, router: RouterLoss | None, steps: int
) -> None:
    """Run the checks of all steps before the first step."""
    host = policy.host
    loss.check_head(host.head)
    for part in batches.every():
        loss.check(part)
        host.check(part, training=True, routed=router is not None)
    # A scope that is a list refers to the rollouts of a step.
    listed = router is not None and not isinstance(router.scope, str)
    for part in (batches.at(n).batch for n in range(steps)) if listed else batches.every():
        router_work(host, part, router)


def _refuse_ranks(model: nn.Module) -> None:
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if sharded or isinstance(model, DistributedDataParallel):
        raise UnsupportedError(
            "several ranks hold the model, and replay trains a model of one process. Give it the "
            "whole model, or train on ranks by policy.forward_backward."
        )
    plain = unwrapped(uncompiled(model))
    held, layers = library_of(plain).entry(plain, ()).stage.layers
    if len(held) < layers:
        raise UnsupportedError(
            f"the model holds a stage of a pipeline ({len(held)} of {layers} layers), and replay "
            "trains whole models. Give it the whole model, or train the stages by "
            "policy.forward_backward of wrap(model, mesh=mesh)."
        )


def _set_budgets(sides: list["_Side"], config: Config, folder: ReplayFolder | None) -> None:
    """Set the memory budgets of all sides: the memory that is free for each, or that of the resumed
    replay.

    Gradients and optimizers of all sides stay allocated while one of them runs.
    """
    device = sides[0].policy.host.device
    if config.memory_budget != AUTO or device.type != "cuda":
        return
    if folder is not None and folder.budget_bytes is not None:
        budget = folder.budget_bytes
    else:
        parameters = [parameter for side in sides for parameter in side.parameters]
        budget = measured_budget(device, parameters, config)
    for side in sides:
        side.policy.use_memory_budget(budget)


def _set_prices(
    sides: list["_Side"], config: Config, folder: ReplayFolder | None
) -> Calibration | None:
    """Set one calibration for all sides: that of the resumed replay, or one that is found or
    measured now."""
    policy = sides[0].policy
    if config.calibration != AUTO:
        return None
    saved = None if folder is None else folder.calibration()
    found = saved or policy.model_state.calibration(policy.host, config)
    for side in sides:
        side.policy.model_state.use_calibration(config, found)
    return found


class _Side:
    """A policy with its optimizer."""

    def __init__(
        self, model: nn.Module, config: Config, optimizer: MakeOptimizer, router: RouterLoss | None
    ) -> None:
        self.model = model
        self.router = router
        self.policy: Policy = wrap(model, config)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer(self.parameters)

    def step(
        self, given: StepInput, loss: Loss, max_grad_norm: float | None
    ) -> tuple[StepRecord, Plan]:
        """Run one optimizer step. The time excludes the norm of the gradient."""
        device = self.policy.host.device
        cuda = device.type == "cuda"
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
                router=self.router,
            )
        norm = _gradient_norm(self.parameters)
        with clock:
            if max_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(self.parameters, max_grad_norm, norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        plan = stats.plan
        assert plan.shape is not None
        record = StepRecord(
            loss=stats.loss,
            gradient_norm=float(norm),
            ms=clock.ms,
            phase_ms=stats.phase_ms,
            events=stats.events,
            event_ms=stats.event_ms,
            sharing=plan.sharing,
            boundary=plan.boundary,
            microbatches=len(plan.microbatches),
            computed_tokens=plan.computed_tokens,
            flops=plan.shared.step_flops(plan.shape),
            peak_memory_bytes=torch.cuda.max_memory_allocated(device) - held if cuda else None,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            router_loss=stats.router_loss,
        )
        return record, plan


class _Clock:
    """Sum of the times of blocks in ms, with an idle device at both ends of each."""

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


def _train_once(
    sides: dict[str, _Side],
    index: int,
    given: StepInput,
    loss: Loss,
    max_grad_norm: float | None,
    start: list[Tensor],
) -> ReplayStep:
    """Run a step of each side, and compare them. `start`: parameters before the first step."""
    order = sides if index % 2 == 0 else reversed(sides)
    ran = {n: sides[n].step(given, loss, max_grad_norm) for n in order}
    shared, difference = sides["shared"], None
    if "dense" in sides:
        difference = parameter_difference(shared.model, sides["dense"].model, start)
    record, plan = ran["shared"]
    assert plan.shape is not None
    return ReplayStep(
        step=index + 1,
        fingerprint=plan.fingerprint,
        lr=float(shared.optimizer.param_groups[0]["lr"]),
        rollouts=len(given.batch),
        logical_tokens=given.batch.logical_tokens,
        unique_tokens=plan.unique_tokens,
        left_out_tokens=plan.left_out.tokens,
        dense_flops=plan.dense.step_flops(plan.shape),
        shared=record,
        dense=ran["dense"][0] if "dense" in ran else None,
        difference=difference,
    )


def parameter_difference(
    shared: nn.Module, dense: nn.Module, start: list[Tensor]
) -> ParameterDifference:
    """Compare two models of one architecture. `start`: their initial parameters, on any device."""
    largest = signed = absolute = squares = change = 0.0
    count = 0
    for a, b, before in zip(shared.parameters(), dense.parameters(), start, strict=True):
        parts = (x.detach().reshape(-1).split(CHUNK_ELEMENTS) for x in (a, b, before))
        for one, other, old in zip(*parts, strict=True):
            apart = one.double() - other.double()
            moved = other.double() - old.to(other.device).double()
            worst = float(apart.abs().max())
            # Python's max may ignore NaN.
            largest = worst if worst > largest or math.isnan(worst) else largest
            signed += float(apart.sum())
            absolute += float(apart.abs().sum())
            squares += float(apart.square().sum())
            change += float(moved.square().sum())
        count += a.numel()
    return ParameterDifference(
        max=largest,
        mean=signed / count,
        mean_absolute=absolute / count,
        rms=math.sqrt(squares / count),
        rms_change=math.sqrt(change / count),
    )


def _on_host(parameter: nn.Parameter) -> Tensor:
    """A copy in host memory, pinned if each step copies it back."""
    copied = parameter.detach().cpu().clone()
    return copied.pin_memory() if parameter.is_cuda else copied


def _gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Norm of the gradients, summed in float64, because sums in 16 bits would hide differences."""
    norms = [
        torch.linalg.vector_norm(p.grad, dtype=torch.float64)
        for p in parameters
        if p.grad is not None
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.linalg.vector_norm(torch.stack(norms))


def _facts(side: _Side) -> dict[str, Any]:
    """Facts of a model and its device that must be equal when a replay resumes."""
    model, optimizer, device = side.model, side.optimizer, side.policy.host.device
    config: Any = getattr(model, "config", None)
    return {
        "model": {
            "kind": type(model).__name__,
            "config": config.to_dict() if hasattr(config, "to_dict") else None,
            "training": model.training,
            "checkpointed": side.policy.host.shape.checkpointed,
            "initial_parameters": digest_of((*model.named_parameters(), *model.named_buffers())),
        },
        "optimizer": {"kind": type(optimizer).__name__, **optimizer.defaults},
        # These affect the last bits of results.
        "runs_on": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
    }
