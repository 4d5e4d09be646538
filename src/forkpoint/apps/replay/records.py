"""Records of every step of a replay, as objects and as rows of JSON. Imports no torch."""

import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from forkpoint.apps.replay.experts import ExpertLoads, GivenRoutes
from forkpoint.apps.replay.schema import STEP
from forkpoint.errors import ConfigError
from forkpoint.rollouts.schema import SchemaError, finite


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step in one of the two ways.

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
    event_memory_bytes: tuple[int, ...] | None
    """Bytes that CUDA held allocated once each of `events` was issued, above those held when the
    step began; None on the CPU."""
    sharing: str
    boundary: str
    microbatches: int
    computed_tokens: int
    flops: float
    """Counted as for the bound: nothing of ours is useful work."""
    peak_memory_bytes: int | None
    """The most that CUDA held above what it held when the step began; None on the CPU."""
    predicted_peak_bytes: int | None
    """Activations and prefix cache at the plan's worst moment, as counted."""
    router_loss: float | None = None
    """Of the routers of a mixture, with its coefficients; `loss` is without it. None where the
    replay has none."""
    experts: ExpertLoads | None = None
    """None where experts were not counted."""
    routes: GivenRoutes | None = None
    """None where the rollouts have no routes."""


OF_MIXTURES = ("router_loss", "experts", "routes")
"""Fields of a StepRecord that rows have where they are not None."""


@dataclass(frozen=True, kw_only=True)
class ParameterDifference:
    """How far apart the two models' parameters are, over all elements: shared less dense."""

    max: float
    """The largest absolute difference."""
    mean: float
    """With its sign: rounding averages out, a bias does not."""
    mean_absolute: float
    rms: float
    rms_change: float
    """How far the dense model has come from where both began: the yardstick of the others."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """One rank's part of a step."""

    rollouts: int
    logical_tokens: int
    unique_tokens: int
    computed_tokens: int
    microbatches: int
    dense_flops: float
    flops: float
    left_out_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplayStep:
    """The same batch in both ways."""

    step: int
    """Counted from 1."""
    fingerprint: str
    """Of the batch; equal for equal batches."""
    lr: float
    """The learning rate of the first parameter group."""
    rollouts: int
    logical_tokens: int
    unique_tokens: int
    dense_flops: float
    """Counted FLOPs of running every rollout on its own; it leaves out the same."""
    shared: StepRecord
    dense: StepRecord | None
    difference: ParameterDifference | None
    """After this step; None without a baseline."""
    left_out_tokens: int = 0
    """Tokens that give no gradient and are not run, on both sides."""
    others: tuple[RankShare, ...] = ()
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
            return read_step(finite(values))
        except SchemaError as error:
            raise ConfigError(f"this is no row of a replay: {error}. Replay again.") from None


def read_step(values: Any) -> ReplayStep:
    """The step of a row of JSON. Raises SchemaError for what is none."""
    found = STEP(values, "")
    for way in ("shared", "dense"):
        if found[way] is not None:
            # The same few names come in every row.
            events = tuple(map(sys.intern, found[way]["events"]))
            found[way] = StepRecord(**{**found[way], "events": events})
    if found["difference"] is not None:
        found["difference"] = ParameterDifference(**found["difference"])
    found["others"] = tuple(RankShare(**share) for share in found.get("others", ()))
    return ReplayStep(**found)


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
