"""Lines and tables of `forkpoint plan`. Imports no torch."""

import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from forkpoint.apps.cli.output import table
from forkpoint.config import Config
from forkpoint.plan import Plan, Totals
from forkpoint.plan.device_memory import MOST_RANKS, DeviceMemory
from forkpoint.plan.parting import MOVE, GroupParting, Partings
from forkpoint.plan.plan import flops_text
from forkpoint.plan.planner import noise_of
from forkpoint.plan.pricing.totals import EncoderTotals
from forkpoint.units import format_bytes

NO = "no"
MOST_GROUPS = 50
"""Largest number of groups in the table of where they diverge."""
_WHERE = {"group": "within groups", "tree": "within the batch"}
_SHARING = {"none": "none (dense)", "group": "within a group", "tree": "within a batch (tree)"}


def answers(plan: Plan, totals: Totals, partings: Partings) -> dict[str, str]:
    """Lines about sharing, by their names.

    `plan` is the plan of one batch. All batches are planned with the same settings. `totals` are
    sums over all batches.
    """
    found = {
        "shares": _shares(totals),
        "diverge": str(partings),
        "left out": _left_out(totals),
        "encoder": _encoder(totals.encoders),
        "speed-up": _speed_up(totals),
        "microbatches": _microbatches(plan, totals),
    }
    return {name: answer for name, answer in found.items() if answer}


def counted(number: int, what: str) -> str:
    """A number with its noun, such as "1 rollout" and "2,000 rollouts"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _shares(totals: Totals) -> str:
    kinds = {kind.partition(" ")[0] for kind in totals.kinds} - {"none"}
    run, given = totals.computed_tokens, totals.logical_tokens - totals.left_out.tokens
    if not kinds or not given:
        return f"nothing: {given:,} tokens"
    where = " or ".join(text for kind, text in _WHERE.items() if kind in kinds)
    return f"{where}: {run:,} of {given:,} tokens run ({run / given:.0%})"


def _left_out(totals: Totals) -> str:
    left = totals.left_out
    if not left.tokens:
        return ""
    tokens = f"{left.tokens:,} of {totals.logical_tokens:,} tokens"
    if not left.rollouts:
        return f"{tokens}, after the last trained token of their rollout"
    rollouts = counted(left.rollouts, "rollout")
    return f"{tokens}: {rollouts} ({left.groups:,} of {totals.groups:,} groups) without gradient"


def _encoder(found: EncoderTotals) -> str:
    if not found.places:
        return ""
    runs = f"{counted(found.forwards, 'forward')} and {counted(found.backwards, 'backward')}"
    runs += f" for {found.places:,} images and videos in rollouts"
    if found.share is None or found.bound is None:
        return f"{runs}; without its model FLOPs are unknown"
    return f"{runs}; {found.share:.0%} of the step's FLOPs; with it at most {found.bound:.2f}x"


def _speed_up(totals: Totals) -> str:
    rollouts_bound = totals.bound()
    unit = "tokens" if totals.shape is None else "FLOPs"
    bound = f"at most {rollouts_bound:.2f}x (counted in {unit})"
    if totals.predicted_speedup is None:
        return bound
    predicted = f"predicted {totals.predicted_speedup:.2f}x over dense"
    if totals.predicted_speedup > rollouts_bound:
        # Short microbatches leave the device idle, more often in dense training.
        return f"{predicted} within these limits; bound {rollouts_bound:.2f}x in {unit}"
    if totals.predicted_ms is not None:
        predicted += " (calibrated)"
    return f"{predicted}, of {bound}"


def _microbatches(plan: Plan, totals: Totals) -> str:
    of = f"{counted(totals.rollouts, 'rollout')}, {counted(totals.groups, 'group')}"
    if totals.batches > 1:
        of += f", {totals.batches:,} batches"
    return f"{totals.microbatches:,} of at most {plan.max_microbatch_tokens:,} tokens each: {of}"


def memory_answers(
    peak_bytes: int | None, checkpointing: Collection[str], device: DeviceMemory | None
) -> dict[str, str]:
    """Lines about the memory of one device, by their names.

    `checkpointing`: checkpointing policies of its microbatches.
    """
    if peak_bytes is None:
        return {"memory": "not predicted without a model"}
    peak = format_bytes(peak_bytes)
    policies = [NO if name == "none" else name for name in checkpointing]
    how = f"{' or '.join(sorted(policies)) or NO} checkpointing"
    if device is None:
        return {"memory": f"{peak} of activations, {how}; see --device-memory"}
    verdict = "fits" if device.fits(peak_bytes) else "DOES NOT FIT"
    fixed, total = format_bytes(device.besides_bytes), format_bytes(device.total_bytes)
    parts = {
        "weights": device.weights_bytes,
        "gradients": device.gradients_bytes,
        "optimizer": device.optimizer_bytes,
        "CUDA and margin": device.besides_bytes - device.fixed_bytes,
    }
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    found = {"memory": f"{verdict}: {fixed} fixed + {peak} ({how}) in {total}", "fixed": listed}
    return found | ({} if device.ranks == 1 else {"each rank": _of_each_rank(device)})


def _of_each_rank(device: DeviceMemory) -> str:
    """Parts of the fixed memory that one of several ranks holds."""
    if not device.sharded:
        return "all weights and optimizer states, and gradients twice (in buckets too)"
    part, gathered = f"1/{device.ranks}", format_bytes(device.gathered_bytes)
    return f"{part} of all and, in a step, {gathered} of gathered weights and all gradients"


def cost_answers(
    totals: Totals, config: Config, unused: Sequence[str], *, limited: bool
) -> dict[str, str]:
    """Lines about the cost of memory limits and options, and about options without effect, by their
    names.

    `unused`: further options without effect, with the reason. `limited`: whether there is a memory
    budget.
    """
    found: dict[str, str] = {}
    if totals.unlimited_cost:
        more = totals.cost / totals.unlimited_cost - 1
        how = "calibrated" if totals.cost_unit == "ms" else f"counted in {totals.cost_unit}"
        change = f"{abs(more):.1%} {'less' if more < 0 else 'more'} than"
        found["cost"] = f"{change} with everything kept on the device ({how})"
    idle = {
        f"--activations {config.activations}": config.activations in ("recompute", "offload"),
        "--prefix-cache host": config.prefix_cache == "host",
    }
    options = " and ".join(option for option, is_set in idle.items() if is_set)
    none = [*unused]
    if options and not totals.forking:
        none.append(f"{options}: no microbatch reads another")
    if config.head_logits == "recompute" and not limited:
        none.append("--head-logits recompute: logits are kept only within a memory budget")
    return found | ({"no effect": "; ".join(none)} if none else {})


def plan_answers(plan: Plan, totals: Totals) -> dict[str, str]:
    """Lines about the choice of the plan, by their names. Arguments are those of `answers`."""
    found = {"plan": _plan(plan, totals)}
    cheaper = [c for c in plan.candidates if c.cost is not None and c.refused]
    best = min(cheaper, key=lambda c: c.cost or 0.0, default=None)
    # Plans that cost less only within noise are in the table of --details.
    if best is not None and best.cost is not None and best.cost * (1 + noise_of(plan)) < plan.cost:
        faster = plan.cost / best.cost
        name = f"{best.sharing} + {best.boundary}"
        found["not chosen"] = f"{name}, predicted {faster:.2f}x faster: {best.refused}"
    return found


def _plan(plan: Plan, totals: Totals) -> str:
    if totals.batches > 1:
        kind, count = totals.kinds.most_common(1)[0]
        others = f", others in {totals.batches - count:,}" if count < totals.batches else ""
        why = "as asked" if plan.reason == "as asked" else "chosen by predicted cost"
        return f"{kind} in {count:,} batches{others}, {why}"
    able = sum(candidate.cost is not None for candidate in plan.candidates)
    chosen = f", chosen of {able}" if able > 1 and plan.sharing != "none" else ""
    return f"{plan.sharing} + {plan.boundary}, {plan.reason}{chosen}"


def further(
    totals: Totals,
    partings: Partings,
    file: str,
    model: Path | None,
    device: DeviceMemory | None,
    peak_bytes: int | None,
    stages: int | None,
) -> str:
    """Text of the line "next". `peak_bytes`: predicted peak of one device."""
    if model is None:
        return "to count FLOPs, add --model, such as --model Qwen/Qwen3-8B (or --details)"
    peak = peak_bytes or 0
    if device is not None and not device.fits(peak):
        if stages is not None:  # --ranks is refused with --stages
            on = counted(stages, "stage")
            return f"does not fit on {on}; this model can have {device.layers:,}"
        return _what_fits(device, peak)
    if partings.needless is not None:
        return MOVE
    if all(kind.startswith("none ") for kind in totals.kinds):
        return "dense training is chosen; --details shows the compared plans"
    weights = shlex.quote(str(model)) if model.exists() else "DIR"
    return f"forkpoint verify {shlex.quote(file)} --model {weights} (or --details)"


def parting_table(groups: Sequence[GroupParting]) -> Table:
    """Table of the tokens at which groups of one batch diverge."""
    rows = [
        (
            "-" if one.group is None else one.group,
            f"{one.rollout:,}",
            f"{one.rollouts:,}",
            f"{one.shortest:,} to {one.longest:,}",
            f"{one.token:,}",
            "prompt" if one.in_prompt else "after the prompt",
        )
        for one in groups[:MOST_GROUPS]
    ]
    columns = ("group_id", "first rollout", "rollouts", "tokens each", "diverge at token", "where")
    caption = "positions of rollouts and tokens count from 0"
    if len(groups) > MOST_GROUPS:
        caption += f"; {counted(len(groups) - MOST_GROUPS, 'more group')} with --json"
    return table("where groups diverge", rows, columns, caption)


def smaller_answers(device: DeviceMemory | None, peak_bytes: int | None) -> dict[str, str]:
    """Line with options that make a step fit on the present devices; empty if it fits already."""
    peak = peak_bytes or 0
    if device is None or device.fits(peak):
        return {}
    fitting = [
        f"{options} ({name})"
        for options, (name, other) in _smaller(device).items()
        if other.has_plan(peak)
    ]
    return {"or fits with": ", or ".join(fitting)} if fitting else {}


def _smaller(device: DeviceMemory) -> dict[str, tuple[str, DeviceMemory]]:
    """Options with smaller optimizer states, or fewer trained parameters: for each, its name and
    the device with it."""
    eight_bits = replace(device, optimizer_bytes_per_parameter=2)
    return {
        "--optimizer-bytes-per-parameter 2": ("8-bit AdamW", eight_bits),
        "--trained-share 0.01": ("LoRA", replace(device, trained_share=0.01)),
    }


def _what_fits(device: DeviceMemory, peak_bytes: int) -> str:
    """Number of ranks on which a step fits, with further options if necessary."""
    smaller = {"": device} | {options: other for options, (_, other) in _smaller(device).items()}
    for options, other in smaller.items():
        if (ranks := other.least_ranks(peak_bytes)) is not None:
            given = f"--ranks {ranks} --shard fully {options}".rstrip()
            return f"fits on {ranks} or more ranks ({given})"
    return f"does not fit on {MOST_RANKS:,} sharded ranks; --stages N divides layers"


def modes(totals: Totals) -> dict[str, dict[str, Any]]:
    """Tokens that run, FLOPs of forward and backward, and bound, for each kind of sharing."""
    shape = totals.shape
    return {
        mode: {
            "tokens": work.tokens,
            "flops": None if shape is None else work.step_flops(shape),
            "bound": totals.bound(mode),
        }
        for mode, work in totals.work.items()
    }


def mode_table(totals: Totals, name: str) -> Table:
    """Table of the savings for each kind of sharing."""
    dense = max(1, totals.work["none"].tokens)
    rows = [
        (
            _SHARING[mode],
            f"{values['tokens']:,}",
            f"{values['tokens'] / dense:.1%}",
            "-" if values["flops"] is None else flops_text(values["flops"]),
            f"{values['bound']:.2f}x",
        )
        for mode, values in modes(totals).items()
    ]
    unit = "tokens" if totals.shape is None else "FLOPs"
    columns = ("sharing", "tokens run", "of dense", "FLOPs", "speed-up")
    caption = f"forward and backward; the speed-up is a bound, counted in {unit}"
    caption += "; without the last token of each rollout"
    if totals.left_out.tokens:
        caption += " and tokens without gradient"
    return table(f"what sharing saves on {name}", rows, columns, caption)
