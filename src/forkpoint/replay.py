"""Real optimizer steps over groups of rollouts: shared and, from the same state, dense beside it.

The dense side is a policy too, with sharing none: rollouts packed into rows, the same head, kernels
and loss. What differs is only that tokens are computed once.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from forkpoint.config import Config
from forkpoint.errors import ConfigError
from forkpoint.losses.base import Loss, LossFunction, as_loss
from forkpoint.policy import Policy, wrap
from forkpoint.rollouts import RolloutBatch

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step in one of the two ways."""

    loss: float
    ms: float
    """Planning, forward, backward and the optimizer's step, with the device idle at both ends."""
    phase_ms: dict[str, float]
    """Of `ms`, the phases of `StepStats.phase_ms`."""
    sharing: str
    boundary: str
    rows: int
    computed_tokens: int
    flops: float
    """Counted as for the bound: nothing of ours is useful work."""
    peak_memory_bytes: int | None
    """The most that CUDA held above what it held when the step began; None on the CPU."""


@dataclass(frozen=True, kw_only=True)
class ReplayStep:
    """The same batch in both ways."""

    rollouts: int
    logical_tokens: int
    unique_tokens: int
    dense_flops: float
    """Counted FLOPs of running every rollout on its own."""
    shared: StepRecord
    dense: StepRecord | None


@dataclass(frozen=True, kw_only=True)
class ParameterDifference:
    """How far apart the two models' parameters are after the last step, over all elements."""

    max: float
    mean: float
    rms: float
    rms_change: float
    """How far the dense model has come from where both began: the yardstick of the others."""


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """What `replay` did."""

    steps: tuple[ReplayStep, ...]
    difference: ParameterDifference | None
    """None without a baseline."""

    @property
    def bound(self) -> float:
        """Counted FLOPs of dense training over those of the edges run, over all steps."""
        shared = sum(step.shared.flops for step in self.steps)
        return sum(step.dense_flops for step in self.steps) / shared if shared else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Sums over the steps, their lists, and what they compare to; ready for JSON."""
        shared = [step.shared for step in self.steps]
        dense = [step.dense for step in self.steps if step.dense is not None]
        difference = self.difference
        values: dict[str, Any] = {
            "steps": len(self.steps),
            "rollouts": sum(step.rollouts for step in self.steps),
            "logical_tokens": sum(step.logical_tokens for step in self.steps),
            "unique_tokens": sum(step.unique_tokens for step in self.steps),
            "computed_tokens": sum(record.computed_tokens for record in shared),
            "rows": sum(record.rows for record in shared),
            "plans": sorted({f"{record.sharing} + {record.boundary}" for record in shared}),
            "bound": self.bound,
            "speedup": None,
            "median_speedup": None,
            "max_loss_difference": None,
            "max_parameter_difference": difference and difference.max,
            "mean_parameter_difference": difference and difference.mean,
            "rms_parameter_difference": difference and difference.rms,
            "rms_parameter_change": difference and difference.rms_change,
            "phase_ms": {},
        }
        for way, records in (("shared", shared), ("dense", dense)):
            ms = [record.ms for record in records]
            peaks = [r.peak_memory_bytes for r in records if r.peak_memory_bytes is not None]
            values |= {
                f"{way}_ms": sum(ms) if ms else None,
                f"{way}_median_ms": statistics.median(ms) if ms else None,
                f"{way}_step_ms": ms or None,
                f"{way}_losses": [record.loss for record in records] or None,
                f"{way}_peak_memory_bytes": max(peaks, default=None),
            }
            values["phase_ms"][way] = _total(record.phase_ms for record in records) or None
        if dense:
            values["speedup"] = values["dense_ms"] / values["shared_ms"]
            values["median_speedup"] = statistics.median(
                d.ms / s.ms for s, d in zip(shared, dense, strict=True)
            )
            values["max_loss_difference"] = max(
                abs(d.loss - s.loss) for s, d in zip(shared, dense, strict=True)
            )
        return values


def replay(
    model: nn.Module,
    batch: RolloutBatch,
    loss: Loss | LossFunction,
    *,
    optimizer: MakeOptimizer,
    steps: int,
    groups_per_step: int = 1,
    baseline: bool = True,
    config: Config | None = None,
    on_step: Callable[[ReplayStep], None] | None = None,
) -> ReplayReport:
    """Train on the batch's groups, cycling through them, and measure every step.

    Args:
        model: a supported model, which is trained; with a baseline, a copy of it is trained too.
        batch: rollouts; step i takes the `groups_per_step` groups that follow those of step i - 1.
        loss: one of `forkpoint.losses`, or a function of (outputs, batch).
        optimizer: makes an optimizer of a list of parameters; called once for each model.
        steps: how many optimizer steps.
        groups_per_step: how many of the batch's groups make the batch of one step.
        baseline: whether to train dense as well. Dense gets the best plan without sharing under the
            limits of `config`. Which of the two goes first alternates from step to step.
        config: how batches are planned and run.
        on_step: called after each step.

    Raises:
        ConfigError: fewer groups than `groups_per_step`, or a count below 1.

    Otherwise as `Policy.forward_backward`; what can be checked is checked before the first step.
    """
    config, loss = config or Config(), as_loss(loss)
    groups = batch.groups()
    if steps < 1:
        raise ConfigError(f"steps is {steps}; it takes a whole number of at least 1.")
    if not 1 <= groups_per_step <= len(groups):
        raise ConfigError(
            f"groups_per_step is {groups_per_step}, and the rollouts have {len(groups)} groups; it "
            f"takes a whole number from 1 to {len(groups)}."
        )
    dense, start = None, []
    if baseline:
        dense_config = replace(config, sharing="none", boundary="auto", waves="packed")
        dense = _Side(copy.deepcopy(model), dense_config, optimizer)
        start = [p.detach().cpu().clone() for p in model.parameters()]
    shared = _Side(model, config, optimizer)
    loss.check(batch)
    shared.policy.host.check(batch, training=True)

    done: list[ReplayStep] = []
    for index in range(steps):
        first = index * groups_per_step
        chosen = [groups[(first + n) % len(groups)] for n in range(groups_per_step)]
        part = batch.select(int(i) for members in chosen for i in members)
        done.append(_step(shared, dense, part, loss, shared_first=index % 2 == 1))
        if on_step is not None:
            on_step(done[-1])
    difference = None
    if dense is not None:
        difference = _difference(model, dense.policy.host.model, start)
    return ReplayReport(steps=tuple(done), difference=difference)


class _Side:
    """A policy with its own optimizer."""

    def __init__(self, model: nn.Module, config: Config, optimizer: MakeOptimizer) -> None:
        self.policy: Policy = wrap(model, config)
        self.optimizer = optimizer([p for p in model.parameters() if p.requires_grad])

    def step(self, batch: RolloutBatch, loss: Loss) -> tuple[StepRecord, int, float]:
        """Train once; also the batch's unique tokens and counted dense FLOPs."""
        device = self.policy.host.device
        cuda = device.type == "cuda"
        held = 0
        if cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        began = time.perf_counter()
        stats = self.policy.forward_backward(batch, loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize(device)
        ms = (time.perf_counter() - began) * 1e3
        plan = stats.plan
        assert plan.shape is not None
        record = StepRecord(
            loss=stats.loss,
            ms=ms,
            phase_ms=stats.phase_ms,
            sharing=plan.sharing,
            boundary=plan.boundary,
            rows=len(plan.rows),
            computed_tokens=plan.computed_tokens,
            flops=plan.shared.step_flops(plan.shape),
            peak_memory_bytes=torch.cuda.max_memory_allocated(device) - held if cuda else None,
        )
        return record, plan.unique_tokens, plan.dense.step_flops(plan.shape)


def _step(
    shared: _Side, dense: _Side | None, batch: RolloutBatch, loss: Loss, *, shared_first: bool
) -> ReplayStep:
    other = None
    if dense is not None and not shared_first:
        other, _, _ = dense.step(batch, loss)
    record, unique_tokens, dense_flops = shared.step(batch, loss)
    if dense is not None and shared_first:
        other, _, _ = dense.step(batch, loss)
    return ReplayStep(
        rollouts=len(batch),
        logical_tokens=batch.logical_tokens,
        unique_tokens=unique_tokens,
        dense_flops=dense_flops,
        shared=record,
        dense=other,
    )


def _difference(
    shared: nn.Module, dense: nn.Module, start: list[torch.Tensor]
) -> ParameterDifference:
    largest = absolute = squares = change = 0.0
    count = 0
    for a, b, before in zip(shared.parameters(), dense.parameters(), start, strict=True):
        apart = (a.detach().double() - b.detach().double()).abs()
        largest = max(largest, float(apart.max()))
        absolute += float(apart.sum())
        squares += float(apart.square().sum())
        change += float((b.detach().cpu().double() - before.double()).square().sum())
        count += apart.numel()
    return ParameterDifference(
        max=largest,
        mean=absolute / count,
        rms=math.sqrt(squares / count),
        rms_change=math.sqrt(change / count),
    )


def _total(phases: Iterator[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for phase_ms in phases:
        for name, ms in phase_ms.items():
            total[name] = total.get(name, 0.0) + ms
    return total
