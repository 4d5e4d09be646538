"""Records of the steps of a replay, as objects and as rows of JSON. Imports no torch."""

import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, get_args

from forkpoint.config import Boundary, Sharing
from forkpoint.plan.program import PHASES
from forkpoint.rollouts.schema import (
    SchemaError,
    array,
    number,
    number_or_nan,
    object_of,
    one_of,
    or_null,
    record,
    text,
    text_like,
    whole,
)

_MS = number(0, 1e12)
Tokens = Annotated[int, whole(0, 2**40)]
Flops = Annotated[float, number(0, 1e60)]
Bytes = Annotated[int | None, or_null(whole(0, 2**62))]
Size = Annotated[float, number_or_nan(0)]
Number = Annotated[float, number_or_nan()]
STEPS = whole(1, 2**31)


def _events(value: Any, field: str) -> tuple[str, ...]:
    return tuple(map(sys.intern, array(text)(value, field)))  # the same few are in every row


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, shared or dense.

    Times are the only values that differ between two runs of one replay; their names end in `ms`.
    """

    loss: Number
    gradient_norm: Size
    """Of all trained parameters' gradients, before any clipping."""
    ms: Annotated[float, number(1e-9, 1e12)]  # times divide each other
    """Planning, forward, backward and the optimizer's step, with the device idle at both ends."""
    phase_ms: Annotated[dict[str, float], record(dict.fromkeys(PHASES, _MS))]
    """Of `ms`, the phases of `StepStats.phase_ms`."""
    events: Annotated[tuple[str, ...], _events]
    """The order of work, such as "forward prefix 0" (`Plan.events`)."""
    event_ms: Annotated[tuple[float, ...], array(_MS)]
    sharing: Annotated[str, one_of(*get_args(Sharing))]
    boundary: Annotated[str, one_of(*get_args(Boundary))]
    microbatches: Tokens
    computed_tokens: Tokens
    flops: Flops
    """Counted FLOPs of the tokens that run."""
    peak_memory_bytes: Bytes
    """The most that CUDA held above what it held when the step began; None on the CPU."""
    predicted_peak_bytes: Bytes
    """Activations and prefix cache at the plan's worst moment, as counted."""
    router_loss: Annotated[float | None, or_null(number())] = None
    """Of the routers of a mixture, with its coefficients; `loss` is without it."""


def _check_events(record: StepRecord, field: str) -> None:
    if len(record.event_ms) != len(record.events):
        raise SchemaError(
            f"{field}.event_ms has {len(record.event_ms)} entries and {field}.events "
            f"{len(record.events)}; they have one for each event"
        )


_STEP_RECORD = object_of(StepRecord, _check_events)


@dataclass(frozen=True, kw_only=True)
class ParameterDifference:
    """Differences of the two models' parameters over all elements: shared less dense."""

    max: Size
    """The largest absolute difference."""
    mean: Number
    """With its sign: rounding averages out, a bias does not."""
    mean_absolute: Size
    rms: Size
    rms_change: Size
    """How far the dense model has come from where both began, for comparison."""


@dataclass(frozen=True, kw_only=True)
class ReplayStep:
    """One batch, trained on shared and, with a baseline, dense."""

    step: Annotated[int, STEPS]
    """Counted from 1."""
    fingerprint: Annotated[str, text_like("[0-9a-f]{16}", "16 digits of 0-9 and a-f")]
    """Of the batch; equal for equal batches."""
    lr: Annotated[float, number()]
    """The learning rate of the first parameter group."""
    rollouts: Tokens
    logical_tokens: Tokens
    unique_tokens: Tokens
    left_out_tokens: Tokens
    """Tokens that give no gradient and are not run, on both sides."""
    dense_flops: Flops
    """Counted FLOPs of running each rollout by itself."""
    shared: Annotated[StepRecord, _STEP_RECORD]
    dense: Annotated[StepRecord | None, or_null(_STEP_RECORD)]
    difference: Annotated[ParameterDifference | None, or_null(object_of(ParameterDifference))]
    """After this step; None without a baseline."""

    @property
    def bound(self) -> float:
        """Counted FLOPs of dense training over those of the tokens that run."""
        return self.dense_flops / self.shared.flops if self.shared.flops else 1.0


read_step: Callable[..., ReplayStep] = object_of(ReplayStep)
"""The step of a row of JSON, given as (values, field); null comes back as NaN. Raises
SchemaError for a field that is missing, not known, or has a value that no replay writes."""


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
