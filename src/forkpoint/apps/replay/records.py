"""Records of the steps of a replay, as objects and as rows of JSON. Imports no torch."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from forkpoint.plan.program import PHASES


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, shared or dense.

    Two runs of a replay differ only in times, whose names end in `ms`.
    """

    loss: float
    gradient_norm: float
    """Norm of the gradients of all trained parameters, before clipping."""
    ms: float
    """Time of planning, forward, backward and the optimizer's step, with an idle device at both
    ends."""
    phase_ms: dict[str, float]
    """Times of the phases, as in `StepStats.phase_ms`."""
    events: tuple[str, ...]
    """Order of work, such as "forward prefix 0" (`Plan.events`)."""
    event_ms: tuple[float, ...]
    sharing: str
    boundary: str
    microbatches: int
    computed_tokens: int
    flops: float
    """Counted FLOPs of the tokens that run."""
    peak_memory_bytes: int | None
    """Peak of CUDA memory above the memory at the begin of the step; None on the CPU."""
    predicted_peak_bytes: int | None
    """Predicted peak of activations and prefix cache."""
    router_loss: float | None = None
    """Router loss with its coefficients, which `loss` does not include."""


@dataclass(frozen=True, kw_only=True)
class ParameterDifference:
    """Differences (shared - dense) of the parameters of two models, over all elements."""

    max: float
    """Largest absolute difference."""
    mean: float
    """Mean difference with its sign. Rounding averages out, but a bias does not."""
    mean_absolute: float
    rms: float
    rms_change: float
    """Root mean square change of the dense model's parameters since the start, for comparison."""


@dataclass(frozen=True, kw_only=True)
class ReplayStep:
    """One step of the shared side and, with a baseline, of the dense side."""

    step: int
    """Number of the step, from 1."""
    fingerprint: str
    """Digest of the batch."""
    lr: float
    """Learning rate of the first parameter group."""
    rollouts: int
    logical_tokens: int
    unique_tokens: int
    left_out_tokens: int
    """Number of tokens without gradient, which neither side runs."""
    dense_flops: float
    """Counted FLOPs without sharing."""
    shared: StepRecord
    dense: StepRecord | None
    difference: ParameterDifference | None
    """Difference of the parameters after this step; None without a baseline."""


def step_of(values: Mapping[str, Any]) -> ReplayStep:
    """Inverse of `dataclasses.asdict` for a step."""
    kinds = {"shared": StepRecord, "dense": StepRecord, "difference": ParameterDifference}
    inner = {name: values[name] and kind(**values[name]) for name, kind in kinds.items()}
    return ReplayStep(**{**values, **inner})


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """Result of `replay`."""

    steps: tuple[ReplayStep, ...]
    resumed_at: int | None = None
    """Number of steps before this run, if it resumed a replay."""

    @property
    def difference(self) -> ParameterDifference | None:
        """Difference of the parameters after the last step; None without a baseline."""
        return self.steps[-1].difference

    @property
    def bound(self) -> float:
        """Counted FLOPs of dense training over those of the tokens that run, over all steps."""
        flops = sum(step.shared.flops for step in self.steps)
        return sum(step.dense_flops for step in self.steps) / flops if flops else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Sums over the steps, lists with an entry for each step, and comparisons, for JSON."""
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
            apart = [abs(d.loss - s.loss) for s, d in pairs]
            # Python's max may ignore NaN.
            values["max_loss_difference"] = math.nan if any(map(math.isnan, apart)) else max(apart)
        return values


def _summed(records: list[StepRecord]) -> dict[str, Any]:
    """Sums of one side over all steps; None if it has no steps."""
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
