"""Records of the steps of a replay, as objects and as rows of JSON. Imports no torch."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from forkpoint.plan.program import PHASES


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, shared or dense.

    Times are the only values that differ between two runs of one replay; their names end in `ms`.
    """

    loss: float
    gradient_norm: float
    """Of all trained parameters' gradients, before any clipping."""
    ms: float
    """Planning, forward, backward and the optimizer's step, with the device idle at both ends."""
    phase_ms: dict[str, float]
    """Of `ms`, the phases of `StepStats.phase_ms`."""
    events: tuple[str, ...]
    """The order of work, such as "forward prefix 0" (`Plan.events`)."""
    event_ms: tuple[float, ...]
    sharing: str
    boundary: str
    microbatches: int
    computed_tokens: int
    flops: float
    """Counted FLOPs of the tokens that run."""
    peak_memory_bytes: int | None
    """The most that CUDA held above what it held when the step began; None on the CPU."""
    predicted_peak_bytes: int | None
    """Activations and prefix cache at the plan's worst moment, as counted."""
    router_loss: float | None = None
    """Of the routers of a mixture, with its coefficients; `loss` is without it."""


@dataclass(frozen=True, kw_only=True)
class ParameterDifference:
    """Differences of the two models' parameters over all elements: shared less dense."""

    max: float
    """The largest absolute difference."""
    mean: float
    """With its sign: rounding averages out, a bias does not."""
    mean_absolute: float
    rms: float
    rms_change: float
    """How far the dense model has come from where both began, for comparison."""


@dataclass(frozen=True, kw_only=True)
class ReplayStep:
    """One batch, trained on shared and, with a baseline, dense."""

    step: int
    """Counted from 1."""
    fingerprint: str
    """Of the batch; equal for equal batches."""
    lr: float
    """The learning rate of the first parameter group."""
    rollouts: int
    logical_tokens: int
    unique_tokens: int
    left_out_tokens: int
    """Tokens that give no gradient and are not run, on both sides."""
    dense_flops: float
    """Counted FLOPs of running each rollout by itself."""
    shared: StepRecord
    dense: StepRecord | None
    difference: ParameterDifference | None
    """After this step; None without a baseline."""

    @property
    def bound(self) -> float:
        """Counted FLOPs of dense training over those of the tokens that run."""
        return self.dense_flops / self.shared.flops if self.shared.flops else 1.0


def step_of(values: Mapping[str, Any]) -> ReplayStep:
    """The step whose `dataclasses.asdict` these values are."""
    kinds = {"shared": StepRecord, "dense": StepRecord, "difference": ParameterDifference}
    inner = {name: values[name] and kind(**values[name]) for name, kind in kinds.items()}
    return ReplayStep(**{**values, **inner})


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """Result of `replay`."""

    steps: tuple[ReplayStep, ...]
    resumed_at: int | None = None
    """How many steps had been done before this run, where it resumed one."""

    @property
    def difference(self) -> ParameterDifference | None:
        """Between the parameters after the last step; None without a baseline."""
        return self.steps[-1].difference

    @property
    def bound(self) -> float:
        """Counted FLOPs of dense training over those of the tokens that run, over all steps."""
        flops = sum(step.shared.flops for step in self.steps)
        return sum(step.dense_flops for step in self.steps) / flops if flops else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Sums over the steps, lists with an entry for each, and their comparison; for JSON."""
        shared = [step.shared for step in self.steps]
        dense = [step.dense for step in self.steps if step.dense is not None]
        difference = {} if self.difference is None else asdict(self.difference)
        counts = ("rollouts", "logical_tokens", "unique_tokens", "left_out_tokens")
        values: dict[str, Any] = {
            "steps": len(self.steps),
            "resumed_at": self.resumed_at,
            **{name: sum(getattr(step, name) for step in self.steps) for name in counts},
            "computed_tokens": sum(record.computed_tokens for record in shared),
            "microbatches": sum(record.microbatches for record in shared),
            "plans": sorted({f"{record.sharing} + {record.boundary}" for record in shared}),
            "bound": self.bound,
            "speedup": None,
            "median_speedup": None,
            "max_loss_difference": None,
            "max_parameter_difference": difference.get("max"),
            "mean_parameter_difference": difference.get("mean"),
            "mean_absolute_parameter_difference": difference.get("mean_absolute"),
            "rms_parameter_difference": difference.get("rms"),
            "rms_parameter_change": difference.get("rms_change"),
        }
        for side, records in (("shared", shared), ("dense", dense)):
            values |= {f"{side}_{name}": value for name, value in _summed(records).items()}
        if dense:
            pairs = list(zip(shared, dense, strict=True))
            values["speedup"] = values["dense_ms"] / values["shared_ms"]
            values["median_speedup"] = statistics.median(d.ms / s.ms for s, d in pairs)
            values["max_loss_difference"] = max(abs(d.loss - s.loss) for s, d in pairs)
        return values


def _summed(records: list[StepRecord]) -> dict[str, Any]:
    """Values of one side over all steps; None for each without steps."""
    ms = [record.ms for record in records]
    return {
        "ms": sum(ms) if ms else None,
        "median_ms": statistics.median(ms) if ms else None,
        "step_ms": ms or None,
        "phase_ms": {n: sum(r.phase_ms[n] for r in records) for n in PHASES} if ms else None,
        "losses": _known(record.loss for record in records),
        "router_losses": _known(record.router_loss for record in records),
        "gradient_norms": _known(record.gradient_norm for record in records),
        "peak_memory_bytes": max(
            (r.peak_memory_bytes for r in records if r.peak_memory_bytes is not None), default=None
        ),
    }


def _known(values: Iterable[float | None]) -> list[float] | None:
    return [value for value in values if value is not None] or None
