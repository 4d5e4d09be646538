"""Records of every step of a replay, as objects and as rows of JSON. Imports no torch."""

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, get_args

from forkpoint.apps.replay.experts import ExpertLoads, GivenRoutes, expert_loads, given_routes
from forkpoint.apps.replay.schema import STEPS
from forkpoint.config import Boundary, Sharing
from forkpoint.errors import ConfigError
from forkpoint.plan.program import PHASES
from forkpoint.plan.written import BYTES, FINGERPRINT, MOST_TOKENS
from forkpoint.rollouts.schema import (
    SchemaError,
    array,
    finite,
    number,
    number_or_nan,
    object_of,
    one_of,
    or_null,
    record,
    text,
    whole,
)

_MS = number(0, 1e12)
Tokens = Annotated[int, whole(0, MOST_TOKENS)]
SomeTokens = Annotated[int, whole(1, MOST_TOKENS)]
Flops = Annotated[float, number(0, 1e60)]
Bytes = Annotated[int | None, BYTES]
Size = Annotated[float, number_or_nan(0)]
Number = Annotated[float, number_or_nan()]


def _events(value: Any, field: str) -> tuple[str, ...]:
    return tuple(map(sys.intern, array(text)(value, field)))  # the same few are in every row


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step in one of the two ways.

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
    event_memory_bytes: Annotated[tuple[int, ...] | None, or_null(array(whole(-(2**62), 2**62)))]
    """Bytes that CUDA held allocated once each of `events` was issued, above those held when the
    step began; None on the CPU."""
    sharing: Annotated[str, one_of(*get_args(Sharing))]
    boundary: Annotated[str, one_of(*get_args(Boundary))]
    microbatches: Tokens
    computed_tokens: Tokens
    flops: Flops
    """Counted as for the bound: nothing of ours is useful work."""
    peak_memory_bytes: Bytes
    """The most that CUDA held above what it held when the step began; None on the CPU."""
    predicted_peak_bytes: Bytes
    """Activations and prefix cache at the plan's worst moment, as counted."""
    router_loss: Annotated[float | None, number_or_nan()] = None
    """Of the routers of a mixture, with its coefficients; `loss` is without it. None where the
    replay has none."""
    experts: Annotated[ExpertLoads | None, expert_loads] = None
    """None where experts were not counted."""
    routes: Annotated[GivenRoutes | None, given_routes] = None
    """None where the rollouts have no routes."""


def _check_events(record: StepRecord, field: str) -> None:
    for name in ("event_ms", "event_memory_bytes"):
        values = getattr(record, name)
        if values is not None and len(values) != len(record.events):
            raise SchemaError(
                f"{field}.{name} has {len(values)} entries and {field}.events "
                f"{len(record.events)}; they have one for each event"
            )


_STEP_RECORD = object_of(StepRecord, _check_events)
OF_MIXTURES = ("router_loss", "experts", "routes")
"""Fields of a StepRecord that rows have where they are not None."""


@dataclass(frozen=True, kw_only=True)
class ParameterDifference:
    """How far apart the two models' parameters are, over all elements: shared less dense."""

    max: Size
    """The largest absolute difference."""
    mean: Number
    """With its sign: rounding averages out, a bias does not."""
    mean_absolute: Size
    rms: Size
    rms_change: Size
    """How far the dense model has come from where both began: the yardstick of the others."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """One rank's part of a step."""

    rollouts: Tokens
    logical_tokens: Tokens
    unique_tokens: Tokens
    computed_tokens: Tokens
    microbatches: Tokens
    dense_flops: Flops
    flops: Flops
    left_out_tokens: Tokens = 0


@dataclass(frozen=True, kw_only=True)
class ReplayStep:
    """The same batch in both ways."""

    step: Annotated[int, STEPS]
    """Counted from 1."""
    fingerprint: Annotated[str, FINGERPRINT]
    """Of the batch; equal for equal batches."""
    lr: Annotated[float, number()]
    """The learning rate of the first parameter group."""
    rollouts: SomeTokens
    logical_tokens: SomeTokens
    unique_tokens: SomeTokens
    dense_flops: Flops
    """Counted FLOPs of running every rollout on its own; it leaves out the same."""
    shared: Annotated[StepRecord, _STEP_RECORD]
    dense: Annotated[StepRecord | None, or_null(_STEP_RECORD)]
    difference: Annotated[ParameterDifference | None, or_null(object_of(ParameterDifference))]
    """After this step; None without a baseline."""
    left_out_tokens: Tokens = 0
    """Tokens that give no gradient and are not run, on both sides."""
    others: Annotated[tuple[RankShare, ...], array(object_of(RankShare))] = ()
    """On several ranks the parts of all but the first, whose own is this step. Losses and
    gradients' norms are of all ranks."""

    @property
    def share(self) -> RankShare:
        """The first rank's part, or all where it is alone."""
        return RankShare(
            rollouts=self.rollouts,
            logical_tokens=self.logical_tokens,
            unique_tokens=self.unique_tokens,
            computed_tokens=self.shared.computed_tokens,
            microbatches=self.shared.microbatches,
            dense_flops=self.dense_flops,
            flops=self.shared.flops,
            left_out_tokens=self.left_out_tokens,
        )

    def total(self, name: str) -> Any:
        """The sum over ranks of a field of `RankShare`."""
        return sum(getattr(share, name) for share in (self.share, *self.others))

    @property
    def bound(self) -> float:
        """Counted FLOPs of dense training over those of the edges run."""
        flops = self.total("flops")
        return self.total("dense_flops") / flops if flops else 1.0

    def to_dict(self) -> dict[str, Any]:
        """A row of JSON; `from_dict` reads it back."""
        values = asdict(self)
        if not self.others:
            del values["others"]
        for way in ("shared", "dense"):
            row = values[way] or {}
            for name in OF_MIXTURES:
                if name in row and row[name] is None:
                    del row[name]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ReplayStep":
        """The step of a row of JSON; numbers that JSON lacks come back as NaN.

        Raises ConfigError where a field is missing, is none of ours, or has a value that no replay
        writes.
        """
        try:
            return read_step(finite(values), "")
        except SchemaError as error:
            raise ConfigError(f"this is no row of a replay: {error}. Replay again.") from None


read_step: Callable[..., ReplayStep] = object_of(ReplayStep)
"""The step of a row of JSON, given as (values, field). Raises SchemaError."""


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
        """Counted FLOPs of dense training over those of the edges run, over all steps."""
        shared = sum(step.total("flops") for step in self.steps)
        return sum(step.total("dense_flops") for step in self.steps) / shared if shared else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Sums over the steps, their lists, and what they compare to; ready for JSON."""
        shared = [step.shared for step in self.steps]
        dense = [step.dense for step in self.steps if step.dense is not None]
        difference = self.difference
        values: dict[str, Any] = {
            "steps": len(self.steps),
            "resumed_at": self.resumed_at,
            "rollouts": sum(step.total("rollouts") for step in self.steps),
            "logical_tokens": sum(step.total("logical_tokens") for step in self.steps),
            "unique_tokens": sum(step.total("unique_tokens") for step in self.steps),
            "left_out_tokens": sum(step.total("left_out_tokens") for step in self.steps),
            "computed_tokens": sum(step.total("computed_tokens") for step in self.steps),
            "microbatches": sum(step.total("microbatches") for step in self.steps),
            "plans": sorted({f"{record.sharing} + {record.boundary}" for record in shared}),
            "bound": self.bound,
            "speedup": None,
            "median_speedup": None,
            "max_loss_difference": None,
            "max_parameter_difference": difference and difference.max,
            "mean_parameter_difference": difference and difference.mean,
            "mean_absolute_parameter_difference": difference and difference.mean_absolute,
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
                f"{way}_gradient_norms": [record.gradient_norm for record in records] or None,
                f"{way}_peak_memory_bytes": max(peaks, default=None),
                f"{way}_router_losses": [
                    r.router_loss for r in records if r.router_loss is not None
                ]
                or None,
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


def _total(phases: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for phase_ms in phases:
        for name, ms in phase_ms.items():
            total[name] = total.get(name, 0.0) + ms
    return total
