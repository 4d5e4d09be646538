"""The six lines that `forkpoint plan` answers with. Imports no torch."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from forkpoint.plan import Estimate, Plan, Totals
from forkpoint.plan.device_memory import DeviceMemory
from forkpoint.units import shown

LABEL = 14
WIDTH = 80
_WHERE = {"group": "within groups", "tree": "within the batch"}


def plan_lines(
    plan: Plan,
    totals: Totals,
    estimate: Estimate,
    file: Path,
    model: Path | None,
    device: DeviceMemory | None = None,
    remedies: Sequence[str] = (),
) -> list[str]:
    """Answers, each a line: what shares, what that saves, what runs, memory, why, what next; and
    what gives no gradient, where there is any.

    Args:
        plan: of the one batch, or of one of several, all planned with the same settings.
        totals: over the plans of all batches.
        estimate: what all batches share.
        file: the rollouts.
        model: as it was named; None where tokens alone are counted.
        device: the device that is planned for, if one was given.
        remedies: settings with which it fits there, where it does not.
    """
    answers = {
        "shares": _shares(totals),
        **_left_out(totals, estimate.groups),
        "speed-up": _speed_up(totals),
        "microbatches": _microbatches(plan, totals, estimate.groups),
        "memory": _memory(totals, device),
        "plan": _plan(plan, totals),
        "next": _next(totals, file, model),
    }
    if device is not None and not device.fits(totals.predicted_peak_bytes or 0):
        answers["next"] = _remedy(remedies)
    return [f"{name:{LABEL}}{answer}" for name, answer in answers.items()]


def _shares(totals: Totals) -> str:
    ways = {kind.partition(" ")[0] for kind in totals.kinds} - {"none"}
    if not ways:
        return f"nothing: {totals.logical_tokens - totals.left_out.tokens:,} tokens"
    where = " or ".join(text for way, text in _WHERE.items() if way in ways)
    # Leaving out is no sharing.
    run, given = totals.computed_tokens, totals.logical_tokens - totals.left_out.tokens
    return f"{where}: {run:,} of {given:,} tokens run ({run / given:.0%})"


def _left_out(totals: Totals, groups: int) -> dict[str, str]:
    """A line on tokens that give no gradient; none where all do."""
    away = totals.left_out
    if not away.tokens:
        return {}
    tokens = f"{away.tokens:,} of {totals.logical_tokens:,} tokens"
    if not away.rollouts:
        return {"left out": f"{tokens}, after the last trained token of their rollout"}
    rollouts = _count(away.rollouts, "rollout")
    return {
        "left out": f"{tokens}: {rollouts} ({away.groups:,} of {groups:,} groups) without gradient"
    }


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
    of = f"{_count(totals.rollouts, 'rollout')}, {_count(groups, 'group')}"
    if totals.batches > 1:
        of += f", {totals.batches:,} batches"
    return f"{totals.microbatches:,} of at most {plan.max_microbatch_tokens:,} tokens each: {of}"


def _memory(totals: Totals, device: DeviceMemory | None) -> str:
    if totals.predicted_peak_bytes is None:
        return "not predicted without a model"
    peak = shown(totals.predicted_peak_bytes)
    if device is None:
        return f"{peak} of activations and prefix cache; see --device-memory 80GB"
    verdict = "fits" if device.fits(totals.predicted_peak_bytes) else "DOES NOT FIT"
    fixed = f"{shown(device.besides_bytes)} of weights etc."
    return f"{verdict}: {fixed} + {peak} in {shown(device.total_bytes)}"


def _remedy(remedies: Sequence[str]) -> str:
    """Settings that make it fit, as far as there is room for them."""
    if not remedies:
        return "take a larger device, a smaller model, or shards of it on several"
    found = remedies[0]
    for other in remedies[1:]:
        if len(f"{found}, or {other}") <= WIDTH - LABEL - len("fits with "):
            found = f"{found}, or {other}"
    return f"fits with {found}"


def _plan(plan: Plan, totals: Totals) -> str:
    if totals.batches > 1:
        kind, count = totals.kinds.most_common(1)[0]
        others = f", others in {totals.batches - count:,}" if count < totals.batches else ""
        why = "as asked" if plan.reason == "as asked" else "as is predicted to be fastest"
        return f"{kind} in {count:,} batches{others}, {why}"
    able = sum(candidate.cost is not None for candidate in plan.candidates)
    chosen = f", chosen of {able}" if able > 1 and plan.sharing != "none" else ""
    return f"{plan.sharing} + {plan.boundary}, {plan.reason}{chosen}"


def _next(totals: Totals, file: Path, model: Path | None) -> str:
    if model is None:
        return "add --model Qwen/Qwen3-8B, say, to count FLOPs (or --details)"
    if all(kind.startswith("none ") for kind in totals.kinds):
        return "nothing to gain here; --details shows what was looked at"
    weights = shlex.quote(str(model)) if model.exists() else "DIR"
    for named, given in ((shlex.quote(str(file)), weights), ("FILE", weights)):
        answer = f"forkpoint verify {named} --model {given} (or --details)"
        if len(answer) <= WIDTH - LABEL:
            return answer
    return "forkpoint verify FILE --model DIR (or --details)"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
