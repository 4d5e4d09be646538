"""Answers at the top of a chapter: gradients, speed, tokens, memory. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from forkpoint.apps.replay.records import ReplayStep
from forkpoint.apps.report.figure import Tile
from forkpoint.apps.report.steps import drift_trend
from forkpoint.plan import Totals
from forkpoint.plan.device_memory import DeviceMemory
from forkpoint.units import format_bytes

NORM_BARS = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
"""By dtype: how far gradient norms of equal weights may differ, relative to the norm. Models of
float64 still compute their RMS norms in float32, unless `verify` runs them."""
UNKNOWN_DTYPE = "a dtype that is not known", 2e-2
VERIFY = "forkpoint verify compares every parameter's gradient."
SAME = 0.005
"""Speeds this close to each other read 1.00x."""


def gradients_tile(steps: Sequence[ReplayStep], manifest: Mapping[str, Any]) -> Tile:
    """Whether the gradients of a replay are those of its baseline.

    Only in the first step have both runs the same weights. A replay keeps the norms of gradients,
    so these are compared; a trend of the parameters puts the answer in doubt.
    """
    label = "against the baseline, dense"
    first = steps[0]
    if first.dense is None:
        remark = f"The replay has no baseline to compare with (--baseline dense). {VERIFY}"
        return Tile(value="gradients not compared", label="without a baseline", remark=remark)
    shared, dense = first.shared.gradient_norm, first.dense.gradient_norm
    if not (math.isfinite(shared) and math.isfinite(dense)):
        remark = "The norm of a gradient of step 1 is not a finite number."
        return Tile(value="gradients match: no", label=label, remark=remark, state="bad")
    if shared == dense == 0:
        remark = f"Both gradients of step 1 are zero, which proves little. {VERIFY}"
        return Tile(value="gradients match: not shown", label=label, remark=remark)
    difference = abs(shared - dense) / dense if dense else math.inf
    dtype, bar = norm_bar(manifest)
    remark = (
        f"With equal weights (step 1) the norms of the gradients differ by {difference:.1e} of the "
        f"norm; the bar is {bar:.0e} ({dtype}). "
    )
    if difference > bar:
        return Tile(value="gradients match: no", label=label, remark=remark + VERIFY, state="bad")
    last, trend = steps[-1].difference, drift_trend(steps)
    if last is not None:
        remark += (
            f"After {len(steps):,} step{'' if len(steps) == 1 else 's'} the parameters differ by "
            f"{last.rms:.1e}, having moved by {last.rms_change:.1e} (rms)"
        )
        remark += (
            ". " if trend is None else f", {'without' if trend.is_noise else 'with'} a trend. "
        )
    doubtful = trend is not None and not trend.is_noise
    return Tile(
        value=f"gradients match: {'in doubt' if doubtful else 'yes'}",
        label=label,
        remark=remark + VERIFY,
        state="bad" if doubtful else "good",
    )


def norm_bar(manifest: Mapping[str, Any]) -> tuple[str, float]:
    """The dtype of a replay and its bar: as the command was given it, else the model's."""
    options = manifest["about"].get("options") or {}
    config = manifest["fixed"]["model"]["config"] or {}
    for found in (options.get("dtype"), config.get("dtype"), config.get("torch_dtype")):
        if isinstance(found, str) and found in NORM_BARS:
            return found, NORM_BARS[found]
    return UNKNOWN_DTYPE


def faster(speedup: float) -> str:
    """A ratio of times in words: 1.43x faster."""
    if abs(speedup - 1) < SAME:
        return "as fast"
    return f"{speedup:.2f}x faster" if speedup > 1 else f"{1 / speedup:.2f}x slower"


def _with_bound(speedup: float, bound: float) -> str:
    """The words after a speed. One above the counted bound is not called at most that."""
    than = "as dense" if abs(speedup - 1) < SAME else "than dense"
    limit = f"; counted bound {bound:.2f}x" if speedup > bound else f", of at most {bound:.2f}x"
    return than + limit


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
        label=_with_bound(speedup, bound),
        remark="Measured over all steps, the first with its warm-up included. Dense is ordinary "
        "training, and the limit is counted in FLOPs.",
        state="plain" if abs(speedup - 1) < SAME else "good" if speedup > 1 else "bad",
    )


def predicted_speed_tile(totals: Totals) -> Tile:
    """The predicted speed of plans beside their counted bound."""
    unit = "tokens" if totals.shape is None else "FLOPs"
    speedup = totals.predicted_speedup
    if speedup is None:
        return Tile(
            value=f"at most {totals.bound:.2f}x",
            label="faster than dense",
            remark=f"Counted in {unit}. Dense is ordinary training.",
        )
    basis = "counted" if totals.predicted_ms is None else "calibrated on a device"
    return Tile(
        value=f"predicted {faster(speedup)}",
        label=_with_bound(speedup, totals.bound),
        remark=f"Predicted, {basis}: nothing was run. Dense is ordinary training, and the limit is "
        f"counted in {unit}.",
        state="good" if speedup > 1 + SAME else "plain",
    )


def tokens_tile(computed: int, given: int, left_out: int) -> Tile:
    """Tokens computed of those given that give a gradient."""
    of = f"{given:,} given"
    if left_out:
        of = f"{given - left_out:,} that give a gradient ({given:,} given)"
    return Tile(
        value=f"{computed / max(1, given - left_out):.1%}",
        label="of the tokens computed",
        remark=f"{computed:,} of {of}. The rest are shared, and computed once.",
    )


def memory_answer(
    peaks: Sequence[tuple[int, int | None]],
    *,
    measured: bool = False,
    device: DeviceMemory | None = None,
) -> tuple[Tile | None, tuple[str, ...]]:
    """The largest peak of memory, and a warning if a plan needs more than there is.

    Args:
        peaks: of each batch with a known peak: bytes of activations and prefix cache, and of the
            budget that it was planned for (None: no limit).
        measured: whether a device measured them.
        device: the device that is planned for, whose limit counts in place of budgets.
    """
    if not peaks:
        return None, ()
    limits = [budget if device is None else max(0, device.left_bytes) for _, budget in peaks]
    sizes = [peak for peak, _ in peaks]
    too_large = sum(
        limit is not None and size > limit for size, limit in zip(sizes, limits, strict=True)
    )
    largest = max(sizes)
    limit = limits[sizes.index(largest)]
    label = "of memory at the peak"
    remark = "Weights, their gradients and the optimizer come on top."
    remedy = (
        "It is about the least of all plans that were tried. Less is needed by fewer or shorter "
        "rollouts, by frozen layers or adapters, by a sharded model, and by an optimizer of "
        "smaller states."
    )
    if device is not None:
        label += f", of {format_bytes(device.total_bytes)}"
        remark = (
            "Weights, gradients, the optimizer and a margin take "
            f"{format_bytes(device.besides_bytes)} besides."
        )
        remedy = f"{remark} Take bfloat16 weights, an optimizer of smaller states, or shards."
    elif limit is not None:
        label += f", of a budget of {format_bytes(limit)}"
    how = "Measured" if measured else "Predicted"
    tile = Tile(
        value=format_bytes(largest),
        label=label,
        remark=f"{how}: activations and prefix cache at the worst moment. {remark}",
        state="bad" if too_large else "plain",
    )
    if not too_large or limit is None:
        return tile, ()
    plans = "This plan does not fit"
    if len(peaks) > 1:
        plans = f"The plans of {too_large:,} of {len(peaks):,} batches do not fit"
    has = (
        f"the budget is {format_bytes(limit)}"
        if device is None
        else f"{format_bytes(limit)} is left"
    )
    warning = (
        f"{plans}: activations and prefix cache need {format_bytes(largest)}, and {has}. {remedy}"
    )
    return tile, (warning,)
