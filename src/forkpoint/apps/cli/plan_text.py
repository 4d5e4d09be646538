"""Answers of `forkpoint plan` as text. Imports no torch."""

import shlex
from pathlib import Path
from typing import Any

from rich.table import Table

from forkpoint.apps.cli.output import table
from forkpoint.plan import Estimate, Plan, Totals
from forkpoint.plan.device_memory import DeviceMemory
from forkpoint.plan.plan import flops_text
from forkpoint.units import format_bytes

_WHERE = {"group": "within groups", "tree": "within the batch"}
_SHARING = {"none": "none (dense)", "group": "within a group", "tree": "within a batch (tree)"}


def answers(
    plan: Plan,
    totals: Totals,
    groups: int,
    file: Path,
    model: Path | None,
    device: DeviceMemory | None,
) -> dict[str, str]:
    """Answers by their names, each a line.

    `plan` is that of one batch; all are planned with the same settings. `totals` and `groups` are
    of all batches.
    """
    found = {
        "shares": _shares(totals),
        "left out": _left_out(totals, groups),
        "speed-up": _speed_up(totals),
        "microbatches": _microbatches(plan, totals, groups),
        "memory": _memory(totals, device),
        "plan": _plan(plan, totals),
        "next": _next(totals, file, model, device),
    }
    return {name: answer for name, answer in found.items() if answer}


def counted(number: int, what: str) -> str:
    """Such as "1 rollout" and "2,000 rollouts"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _shares(totals: Totals) -> str:
    kinds = {kind.partition(" ")[0] for kind in totals.kinds} - {"none"}
    run, given = totals.computed_tokens, totals.logical_tokens - totals.left_out.tokens
    if not kinds:
        return f"nothing: {given:,} tokens"
    where = " or ".join(text for kind, text in _WHERE.items() if kind in kinds)
    return f"{where}: {run:,} of {given:,} tokens run ({run / given:.0%})"


def _left_out(totals: Totals, groups: int) -> str:
    left = totals.left_out
    if not left.tokens:
        return ""
    tokens = f"{left.tokens:,} of {totals.logical_tokens:,} tokens"
    if not left.rollouts:
        return f"{tokens}, after the last trained token of their rollout"
    rollouts = counted(left.rollouts, "rollout")
    return f"{tokens}: {rollouts} ({left.groups:,} of {groups:,} groups) without gradient"


def _speed_up(totals: Totals) -> str:
    unit = "tokens" if totals.shape is None else "FLOPs"
    bound = f"at most {totals.bound:.2f}x (counted in {unit})"
    if totals.predicted_speedup is None:
        return bound
    predicted = f"predicted {totals.predicted_speedup:.2f}x over dense"
    if totals.predicted_speedup > totals.bound:
        # Short microbatches leave a device idle, dense the more often.
        return f"{predicted} in these limits; bound {totals.bound:.2f}x in {unit}"
    if totals.predicted_ms is not None:
        predicted += " (calibrated)"
    return f"{predicted}, of {bound}"


def _microbatches(plan: Plan, totals: Totals, groups: int) -> str:
    of = f"{counted(totals.rollouts, 'rollout')}, {counted(groups, 'group')}"
    if totals.batches > 1:
        of += f", {totals.batches:,} batches"
    return f"{totals.microbatches:,} of at most {plan.max_microbatch_tokens:,} tokens each: {of}"


def _memory(totals: Totals, device: DeviceMemory | None) -> str:
    if totals.predicted_peak_bytes is None:
        return "not predicted without a model"
    peak = format_bytes(totals.predicted_peak_bytes)
    if device is None:
        return f"{peak} of activations and prefix cache; see --device-memory 80GB"
    verdict = "fits" if device.fits(totals.predicted_peak_bytes) else "DOES NOT FIT"
    fixed = f"{format_bytes(device.besides_bytes)} of weights etc."
    return f"{verdict}: {fixed} + {peak} in {format_bytes(device.total_bytes)}"


def _plan(plan: Plan, totals: Totals) -> str:
    if totals.batches > 1:
        kind, count = totals.kinds.most_common(1)[0]
        others = f", others in {totals.batches - count:,}" if count < totals.batches else ""
        why = "as asked" if plan.reason == "as asked" else "as is predicted to be fastest"
        return f"{kind} in {count:,} batches{others}, {why}"
    able = sum(candidate.cost is not None for candidate in plan.candidates)
    chosen = f", chosen of {able}" if able > 1 and plan.sharing != "none" else ""
    return f"{plan.sharing} + {plan.boundary}, {plan.reason}{chosen}"


def _next(totals: Totals, file: Path, model: Path | None, device: DeviceMemory | None) -> str:
    if model is None:
        return "add --model Qwen/Qwen3-8B, say, to count FLOPs (or --details)"
    if device is not None and not device.fits(totals.predicted_peak_bytes or 0):
        return "try --dtype bfloat16, an optimizer in 8 bits, --trained-share 0.01"
    if all(kind.startswith("none ") for kind in totals.kinds):
        return "nothing to gain here; --details shows what was looked at"
    weights = shlex.quote(str(model)) if model.exists() else "DIR"
    return f"forkpoint verify {shlex.quote(str(file))} --model {weights} (or --details)"


def modes(estimate: Estimate) -> dict[str, dict[str, Any]]:
    """For each way of sharing: tokens run, FLOPs of forward and backward, and the speed-up."""
    shape = estimate.shape
    return {
        mode: {
            "tokens": work.tokens,
            "flops": None if shape is None else work.step_flops(shape),
            "bound": estimate.bound(mode),
        }
        for mode, work in estimate.work.items()
    }


def mode_table(estimate: Estimate, name: str) -> Table:
    """The savings of each way to share."""
    dense = max(1, estimate.work["none"].tokens)
    rows = [
        (
            _SHARING[mode],
            f"{values['tokens']:,}",
            f"{values['tokens'] / dense:.1%}",
            "-" if values["flops"] is None else flops_text(values["flops"]),
            f"{values['bound']:.2f}x",
        )
        for mode, values in modes(estimate).items()
    ]
    unit = "tokens" if estimate.shape is None else "FLOPs"
    columns = ("who shares", "tokens run", "of dense", "FLOPs", "speed-up")
    caption = f"forward and backward; at most that speed-up, counted in {unit}"
    if dense < estimate.logical_tokens - estimate.rollouts:
        caption += "; tokens without gradient are run by none of them"
    return table(f"what sharing saves on {name}", rows, columns, caption)
