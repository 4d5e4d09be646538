"""Answers at the top of a chapter: gradients, speed, tokens, memory. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forkpoint.apps.replay.records import ReplayStep
from forkpoint.apps.report.curves import drift_trend
from forkpoint.apps.report.figure import Tile
from forkpoint.plan import Totals
from forkpoint.units import shown

NORM_BARS = {"float64": 1e-6, "float32": 1e-4}
"""By dtype: how far gradient norms of equal weights may be apart, as a part of the norm. Models of
float64 still compute their RMS norms in float32, unless `verify` runs them."""
WIDEST_BAR = 2e-2
"""For 16 bits, and where the dtype is not known."""
VERIFY = "forkpoint verify compares every parameter's gradient."
SAME = 0.005
"""Speeds this close to each other read 1.00x."""


# Gradients ----------------------------------------------------------------------------------------


def gradients_tile(steps: Sequence[ReplayStep], manifest: Mapping[str, Any]) -> Tile:
    """Whether the gradients of a replay are those of its baseline.

    The first step is what tells: there both ways have the same weights. A replay keeps the norms of
    gradients, so these are compared; a trend of the parameters puts the answer in doubt.
    """
    label = "against the baseline, dense"
    first = steps[0]
    if first.dense is None:
        remark = f"The replay has no baseline to compare with (--baseline dense). {VERIFY}"
        return Tile(value="gradients not compared", label="without a baseline", remark=remark)
    apart = norms_apart(first)
    if apart is None:
        remark = "The norm of a gradient of step 1 is not a finite number."
        return Tile(value="gradients match: no", label=label, remark=remark, state="bad")
    if first.shared.gradient_norm == first.dense.gradient_norm == 0:
        remark = f"Both gradients of step 1 are zero, which proves little. {VERIFY}"
        return Tile(value="gradients match: not shown", label=label, remark=remark)
    dtype, bar = norm_bar(manifest)
    remark = (
        f"With equal weights (step 1) the norms of the gradients differ by {_part(apart)} of the "
        f"norm; the bar is {bar:.0e} ({dtype}). "
    )
    if apart > bar:
        return Tile(value="gradients match: no", label=label, remark=remark + VERIFY, state="bad")
    last, trend = steps[-1].difference, drift_trend(steps)
    if last is not None:
        remark += (
            f"After {len(steps):,} step{'' if len(steps) == 1 else 's'} the parameters are "
            f"{last.rms:.1e} apart, having moved by {last.rms_change:.1e} (rms)"
        )
        remark += (
            ". " if trend is None else f", {'without' if trend.is_noise else 'with'} a trend. "
        )
    if trend is not None and not trend.is_noise:
        return Tile(
            value="gradients match: in doubt", label=label, remark=remark + VERIFY, state="bad"
        )
    return Tile(value="gradients match: yes", label=label, remark=remark + VERIFY, state="good")


def norms_apart(step: ReplayStep) -> float | None:
    """Difference of a step's gradient norms as a part of dense's; None where one is not finite."""
    assert step.dense is not None
    shared, dense = step.shared.gradient_norm, step.dense.gradient_norm
    if not (math.isfinite(shared) and math.isfinite(dense)):
        return None
    if shared == dense:
        return 0.0
    return abs(shared - dense) / dense if dense else math.inf


def norm_bar(manifest: Mapping[str, Any]) -> tuple[str, float]:
    """The dtype of a replay, in words, and its bar: as the command was given it, else the
    model's."""
    options = manifest["about"].get("options") or {}
    config = manifest["fixed"]["model"]["config"] or {}
    for found in (options.get("dtype"), config.get("dtype"), config.get("torch_dtype")):
        if found in ("bfloat16", "float16"):
            return found, WIDEST_BAR
        if isinstance(found, str) and found in NORM_BARS:
            return found, NORM_BARS[found]
    return "a dtype that is not known", WIDEST_BAR


def _part(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


# Speed and tokens ---------------------------------------------------------------------------------


def faster(speedup: float) -> str:
    """A ratio of times in words: 1.43x faster."""
    if abs(speedup - 1) < SAME:
        return "as fast"
    return f"{speedup:.2f}x faster" if speedup > 1 else f"{1 / speedup:.2f}x slower"


def _beside(speedup: float, bound: float) -> str:
    """The words after a speed. One above the counted bound is not called at most that."""
    than = "as dense" if abs(speedup - 1) < SAME else "than dense"
    return (
        f"{than}; counted bound {bound:.2f}x"
        if speedup > bound
        else (f"{than}, of at most {bound:.2f}x")
    )


def measured_speed_tile(speedup: float | None, bound: float) -> Tile:
    """The speed of a replay beside its counted bound."""
    if speedup is None:
        return Tile(
            value=f"at most {bound:.2f}x",
            label="faster than dense",
            remark="Counted in FLOPs. Dense, which is ordinary training, was not run.",
        )
    return Tile(
        value=faster(speedup),
        label=_beside(speedup, bound),
        remark="Measured over all steps, the first with its warm-up included. Dense is ordinary "
        "training, and the limit is counted in FLOPs.",
        state="plain" if abs(speedup - 1) < SAME else "good" if speedup > 1 else "bad",
    )


def predicted_speed_tile(totals: Totals) -> Tile:
    """The predicted speed of plans beside their counted bound."""
    unit = "tokens" if totals.shape is None else "FLOPs"
    if totals.predicted_speedup is None:
        return Tile(
            value=f"at most {totals.bound:.2f}x",
            label="faster than dense",
            remark=f"Counted in {unit}. Dense is ordinary training.",
        )
    basis = "counted" if totals.predicted_ms is None else "calibrated on a device"
    remark = f"Predicted, {basis}: nothing was run. Dense is ordinary training, and the limit is "
    remark += f"counted in {unit}."
    if totals.predicted_speedup > totals.bound:
        remark += " In these limits dense leaves a device idle the more often."
    return Tile(
        value=f"predicted {faster(totals.predicted_speedup)}",
        label=_beside(totals.predicted_speedup, totals.bound),
        remark=remark,
        state="good" if totals.predicted_speedup > 1 + SAME else "plain",
    )


def tokens_tile(computed: int, given: int, left_out: int) -> Tile:
    """Tokens computed of those given that give a gradient."""
    what = f"{given:,} given"
    if left_out:
        what = f"{given - left_out:,} that give a gradient ({given:,} given)"
    return Tile(
        value=f"{computed / max(1, given - left_out):.1%}",
        label="of the tokens computed",
        remark=f"{computed:,} of {what}. The rest are shared, and computed once.",
    )


# Memory -------------------------------------------------------------------------------------------

SET_A_BUDGET = (
    "Set --memory-budget (Config.memory_budget) to what is free for them: microbatches then get "
    "shorter, and activations are computed again."
)
LESS_MEMORY = (
    "It is about the least of all plans that were tried. Less is needed by fewer or shorter "
    "rollouts, by frozen layers or adapters, by a sharded model, and by an optimizer of smaller "
    "states."
)
LESS_BESIDES = (
    "Less is taken by bfloat16 weights, by an optimizer of smaller states, by frozen layers or "
    "adapters, and by a model that is sharded over several devices."
)


@dataclass(kw_only=True)
class Peak:
    """The largest peak of memory of several batches.

    Attributes:
        peak_bytes: activations, prefix cache and its gradients; None where none is known.
        room_bytes: what there is for the largest of them; None where no limit is known.
        budgeted: whether that is the budget that its plan was made for.
        measured: whether a device said so.
        too_large: how many batches need more than there is.
        batches: how many there are.
        besides_bytes: what weights, gradients, the optimizer and a margin take; None where that is
            not known.
    """

    peak_bytes: int | None = None
    room_bytes: int | None = None
    budgeted: bool = False
    measured: bool = False
    too_large: int = 0
    batches: int = 0
    besides_bytes: int | None = None

    def add(
        self, peak_bytes: int | None, budget_bytes: int | None, device_bytes: int | None
    ) -> None:
        """Count one batch more, and whether its peak is beyond the room that there is for it.

        Args:
            peak_bytes: of its plan or of its step; None where it is not known.
            budget_bytes: what its plan was made for; None is no limit.
            device_bytes: all the memory of the device, which is the limit without a budget; None
                where it is not known.
        """
        self.batches += 1
        if peak_bytes is None:
            return
        budgeted = budget_bytes is not None
        room_bytes = budget_bytes if budgeted else device_bytes
        if device_bytes is not None and self.besides_bytes is not None:
            room_bytes = max(0, device_bytes - self.besides_bytes)
        if self.peak_bytes is None or peak_bytes > self.peak_bytes:
            self.peak_bytes, self.room_bytes, self.budgeted = peak_bytes, room_bytes, budgeted
        self.too_large += room_bytes is not None and peak_bytes > room_bytes

    def tile(self, device_memory_bytes: int | None) -> Tile | None:
        """The peak beside the memory of the device, or beside the budget; None without a peak."""
        if self.peak_bytes is None:
            return None
        how = "Measured" if self.measured else "Predicted"
        remark = f"{how}: activations and prefix cache at the worst moment. "
        label = "of memory at the peak"
        if device_memory_bytes is not None:
            label += f", of {shown(device_memory_bytes)}"
            if self.besides_bytes is not None:
                remark += "Weights, gradients, the optimizer and a margin take "
                remark += f"{shown(self.besides_bytes)} besides."
                state = "bad" if self.too_large else "plain"
                return Tile(value=shown(self.peak_bytes), label=label, remark=remark, state=state)
            left = max(0, device_memory_bytes - self.peak_bytes)
            remark += f"{shown(left) if left else 'Nothing'} is left for weights, their gradients "
            remark += "and the optimizer."
        elif self.room_bytes is not None:
            label += f", of a budget of {shown(self.room_bytes)}"
            remark += "Weights, their gradients and the optimizer are not in it."
        else:
            remark += "Weights, their gradients and the optimizer come on top."
        state = "bad" if self.too_large else "plain"
        return Tile(value=shown(self.peak_bytes), label=label, remark=remark, state=state)

    def warnings(self) -> tuple[str, ...]:
        """A warning where a plan needs more than there is."""
        if not self.too_large or self.peak_bytes is None or self.room_bytes is None:
            return ()
        what = "This plan does not fit"
        if self.batches > 1:
            what = f"The plans of {self.too_large:,} of {self.batches:,} batches do not fit"
        if self.besides_bytes is not None:
            return (
                f"{what}: weights, gradients, the optimizer and a margin take "
                f"{shown(self.besides_bytes)}, which leaves {shown(self.room_bytes)}, and "
                f"activations and prefix cache need {shown(self.peak_bytes)}. {LESS_BESIDES}",
            )
        has = "the budget is" if self.budgeted else "the device has"
        return (
            f"{what}: activations and prefix cache need {shown(self.peak_bytes)}, and {has} "
            f"{shown(self.room_bytes)}. {LESS_MEMORY if self.budgeted else SET_A_BUDGET}",
        )
