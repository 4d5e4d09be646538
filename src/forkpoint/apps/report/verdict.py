"""Answers at the top of a chapter: gradients, speed, tokens, memory. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forkpoint.apps.replay.records import ReplayStep
from forkpoint.apps.replay.trend import Trend, trend
from forkpoint.plan import Totals
from forkpoint.units import format_bytes

NORM_BARS = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
"""By dtype: how far gradient norms of equal weights may differ, relative to the norm. Models of
float64 still compute their RMS norms in float32, unless `verify` runs them."""
UNKNOWN_DTYPE = "a dtype that is not known", 2e-2
VERIFY = "forkpoint verify compares every parameter's gradient."
SAME = 0.005
"""Speeds this close to each other read 1.00x."""
LEAST_STEPS = 20
"""Fewer steps say nothing about a trend."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One answer at the top of a chapter."""

    value: str
    label: str
    remark: str = ""
    state: Literal["good", "bad", "plain"] = "plain"
    """Whether it is what a reader hopes for, where that can be told."""


def drift_trend(steps: Sequence[ReplayStep]) -> Trend | None:
    """The trend of the mean parameter difference; None where there is too little to tell."""
    means = [step.difference.mean for step in steps if step.difference is not None]
    if len(means) < LEAST_STEPS or not all(abs(mean) < 1e100 for mean in means):
        return None
    return trend(means)


def gradients_tile(steps: Sequence[ReplayStep], manifest: Mapping[str, Any]) -> Tile:
    """Whether the gradients of a replay are those of its baseline.

    Only in the first step have both models the same weights. A replay keeps the norms of gradients,
    so these are compared; a trend of the parameters puts the answer in doubt.
    """
    label, first = "against the baseline, dense", steps[0]
    if first.dense is None:
        remark = f"The replay has no baseline to compare with (--baseline dense). {VERIFY}"
        return Tile(value="gradients not compared", label="without a baseline", remark=remark)
    shared, dense = first.shared.gradient_norm, first.dense.gradient_norm
    if shared == dense == 0:
        remark = f"Both gradients of step 1 are zero, which proves little. {VERIFY}"
        return Tile(value="gradients match: not shown", label=label, remark=remark)
    difference = abs(shared - dense) / dense if dense else math.inf
    dtype, bar = norm_bar(manifest)
    remark = (
        f"With equal weights (step 1) the norms of the gradients differ by {difference:.1e} of the "
        f"norm; the bar is {bar:.0e} ({dtype}). "
    )
    if not difference <= bar:  # NaN is not
        return Tile(value="gradients match: no", label=label, remark=remark + VERIFY, state="bad")
    last, found = steps[-1].difference, drift_trend(steps)
    doubtful = found is not None and not found.is_noise
    if last is not None:
        with_trend = "" if found is None else f", {'with' if doubtful else 'without'} a trend"
        remark += (
            f"After {len(steps):,} steps the parameters differ by {last.rms:.1e}, having moved by "
            f"{last.rms_change:.1e} (rms){with_trend}. "
        )
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


def speed_tile(speedup: float | None, bound: float, how: str, *, predicted: bool = False) -> Tile:
    """A speed-up beside its counted bound.

    Args:
        speedup: as measured or predicted; None if only the bound is known.
        bound: counted from the tokens that run.
        how: a sentence on where they come from.
        predicted: whether nothing was run.
    """
    if speedup is None:
        return Tile(value=f"at most {bound:.2f}x", label="faster than dense", remark=how)
    same = abs(speedup - 1) < SAME
    faster = f"{speedup:.2f}x faster" if speedup > 1 else f"{1 / speedup:.2f}x slower"
    limit = f"; counted bound {bound:.2f}x" if speedup > bound else f", of at most {bound:.2f}x"
    return Tile(
        value=("predicted " if predicted else "") + ("as fast" if same else faster),
        label=("as dense" if same else "than dense") + limit,
        remark=how,
        state="plain" if same else "good" if speedup > 1 else "bad",
    )


def measured_speed_tile(speedup: float | None, bound: float) -> Tile:
    """The speed of a replay."""
    if speedup is None:
        how = "Counted in FLOPs. Dense, which is ordinary training, was not run."
    else:
        how = "Measured over all steps, the first with its warm-up included."
    return speed_tile(speedup, bound, how)


def predicted_speed_tile(totals: Totals) -> Tile:
    """The predicted speed of plans."""
    unit = "tokens" if totals.shape is None else "FLOPs"
    how = f"Counted in {unit}: nothing was run. Dense is ordinary training."
    if totals.predicted_ms is not None:
        how = f"Predicted from a calibration: nothing was run. The limit is counted in {unit}."
    return speed_tile(totals.predicted_speedup, totals.bound, how, predicted=True)


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


def memory_tiles(
    peak: int | None, *, measured: bool = False, budget: int | None = None
) -> list[Tile]:
    """The largest peak of memory; no tile where it is not known.

    Args:
        peak: bytes of activations and prefix cache.
        measured: whether a device measured it.
        budget: bytes that plans were made for; None without a limit.
    """
    if peak is None:
        return []
    of_budget = "" if budget is None else f", of a budget of {format_bytes(budget)}"
    return [
        Tile(
            value=format_bytes(peak),
            label=f"of memory at the peak{of_budget}",
            remark=f"{'Measured' if measured else 'Predicted'}: activations and prefix cache at "
            "the worst moment. Weights, their gradients and the optimizer are added.",
            state="plain" if budget is None or peak <= budget else "bad",
        )
    ]
