"""A plan as a person reads it."""

import io

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from forkpoint.plan.contents import PlanContents
from forkpoint.units import shown

MOST_ROWS = 24
MOST_SEGMENTS = 40
MOST_LEVELS = 12


def explain(plan: PlanContents, *, width: int) -> str:
    """Render what runs, what is saved, why this plan was chosen and what was refused."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    # No title of the table, which would be broken where the table ends.
    title = Text(f"plan: {plan.sharing} + {plan.boundary}, {plan.reason}")
    if plan.split:
        how = "on each rank that has them" if plan.split == "replicate" else "on one rank, and sent"
        title.append(f"\nprompts of several ranks run {how}: {plan.split_reason}")
    if plan.gather:
        how = "once a step" if plan.gather == "step" else "for each microbatch, in lockstep"
        title.append(f"\nweights gathered {how}: {plan.gather_reason}")
    console.print(Group(title, _summary(plan), _candidates(plan), _microbatches(plan), _tree(plan)))
    output = console.file
    assert isinstance(output, io.StringIO)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def flops_text(flops: float) -> str:
    """A number of FLOPs as people read it: 14.3 TFLOP."""
    for unit, name in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")):
        if flops >= unit:
            return f"{flops / unit:,.1f} {name}"
    return f"{flops / 1e6:,.1f} MFLOP"


def _summary(plan: PlanContents) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    add = table.add_row
    add("rollouts", f"{plan.rollouts:,}")
    add("logical tokens (as given)", f"{plan.logical_tokens:,}")
    add("unique tokens (once in the whole batch)", f"{plan.unique_tokens:,}")
    away = plan.left_out
    if away.tokens:
        found = f"{away.rollouts:,} ({away.groups:,})"
        add("rollouts (whole groups) without gradient, not run", found)
        add("their tokens, not run", f"{away.rollout_tokens:,}")
        add("tokens after rollouts' last trained ones, not run", f"{away.tail_tokens:,}")
    if plan.last_tokens:
        ends = int(np.unique(plan.forest.leaf[plan.forest.leaf >= 0]).size)
        add("last tokens run for routers, among those computed", f"{ends:,}")
    add("computed tokens (edges run)", f"{plan.computed_tokens:,}")
    if plan.run_tokens != plan.computed_tokens:
        add("padding run besides", f"{plan.run_tokens - plan.computed_tokens:,}")
    add("labelled edges (head), for each temperature", f"{plan.labelled:,}")
    add("microbatches, segments", f"{len(plan.microbatches):,}, {len(plan.forest):,}")
    add("prefix cache held at once, tokens", f"{plan.cache_tokens:,}")
    if plan.shape is not None:
        dense, shared = plan.dense.step_flops(plan.shape), plan.shared.step_flops(plan.shape)
        same = ", which leaves out the same" * bool(away.tokens)
        add(f"FLOPs of a dense step{same}", flops_text(dense))
        add("FLOPs of this step", flops_text(shared))
        again = shared + plan.shared.forward_flops(plan.shape)
        if not away.rollouts:  # of which it would give log-probs as well
            add("FLOPs with policy.logprobs besides", flops_text(again))
        if plan.counts_first:
            add("FLOPs with the pass that counts experts", flops_text(again))
            add("bound with that pass", f"{dense / again:.2f}x")
    elif plan.counts_first:
        add("a pass of scores counts experts first", "yes")
    if plan.predicted_peak_bytes is not None:
        add("activations and prefix cache at the peak", shown(plan.predicted_peak_bytes))
    if plan.memory_budget_bytes is not None:
        name = "budget for them" if plan.fits else "budget for them, which DOES NOT FIT"
        add(name, shown(plan.memory_budget_bytes))
    if plan.predicted_ms is not None:
        add("predicted time of a step, ms", f"{plan.predicted_ms:,.1f}")
    if plan.shape is not None:
        add("predictions rest on", plan.rests_on or "counted FLOPs and bytes")
    unit = "FLOPs" if plan.shape is not None else "tokens"
    add(f"bound on the speed-up ({unit})", f"{plan.bound:.2f}x")
    return table


def _candidates(plan: PlanContents) -> Table:
    """Plans that were looked at, by predicted speed-up; without a dense one, by cost."""
    costs = {(c.sharing, c.boundary): c.cost for c in plan.candidates}
    chosen = plan.sharing, plan.boundary
    dense = min((c for (sharing, _), c in costs.items() if sharing == "none" and c), default=None)
    table = Table(title="looked at")
    figure = "cost against the plan" if dense is None else "predicted speed-up"
    for name in ("sharing", "boundary", figure, "remark"):
        table.add_column(name, justify="right" if name == figure else "left")
    for candidate in plan.candidates:
        combination = candidate.sharing, candidate.boundary
        remark = "chosen" if combination == chosen else candidate.refused or ""
        value = "-"
        if candidate.cost and dense is not None:
            value = f"{dense / candidate.cost:.3f}x"
        elif candidate.cost and (of := costs.get(chosen)):
            value = f"{candidate.cost / of:.3f}"
        table.add_row(*combination, value, remark)
    return table


def _microbatches(plan: PlanContents) -> Table:
    table = Table(title=f"microbatches in visiting order ({plan.leaf_layout} leaf_layout)")
    policies = {microbatch.checkpointing for microbatch in plan.microbatches} - {"none"}
    if policies:
        table.title = f"{table.title}, checkpointing: {', '.join(policies)}"
    if keeping := sum(microbatch.keeps_logits for microbatch in plan.microbatches):
        table.title = f"{table.title}, logits kept in {keeping:,}"
    text = ("microbatch", "reads", "activations")
    names = ["microbatch", "reads", "segments", "tokens", "places", "prefix cache"]
    moved = any(microbatch.activations != "keep" for microbatch in plan.microbatches)
    for name in (*names, *(["activations"] if moved else [])):
        table.add_column(name, justify="left" if name in text else "right")
    for microbatch in plan.microbatches[:MOST_ROWS]:
        kept = sum(
            int(plan.forest.length[s])
            for s, begin in zip(microbatch.segments, microbatch.cache_begin, strict=True)
            if begin >= 0
        )
        parent = plan.microbatch_names[microbatch.parent] if microbatch.parent >= 0 else "-"
        table.add_row(
            plan.microbatch_names[microbatch.index],
            parent,
            f"{len(microbatch.segments):,}",
            f"{microbatch.tokens:,}",
            f"{microbatch.run_tokens:,}",
            f"{kept:,}",
            *([microbatch.activations if microbatch.children else "-"] if moved else []),
        )
    if len(plan.microbatches) > MOST_ROWS:
        table.caption = f"and {len(plan.microbatches) - MOST_ROWS:,} microbatches more"
    return table


def _tree(plan: PlanContents) -> Tree | Text:
    forest = plan.forest
    if len(forest) == 0:
        if plan.left_out.rollouts:
            return Text("no edges: no rollout gives a gradient")
        return Text("no edges: every rollout is one token long")
    microbatch_of = {
        segment: microbatch.index
        for microbatch in plan.microbatches
        for segment in microbatch.segments
    }
    top = Tree("segments: tokens x rollouts through them, and their microbatch")
    nodes: dict[int, Tree] = {-1: top}
    multiplicity = forest.multiplicity
    depth = forest.depth
    for segment in range(len(forest)):
        if depth[segment] >= MOST_LEVELS or len(nodes) > MOST_SEGMENTS:
            continue
        label = (
            f"{int(forest.length[segment]):,} x {int(multiplicity[segment])}  "
            f"{plan.microbatch_names[microbatch_of[segment]]}"
        )
        above = int(forest.parent[segment])
        if above in nodes:
            nodes[segment] = nodes[above].add(label)
    hidden = len(forest) - (len(nodes) - 1)
    if hidden:
        top.add(f"and {hidden:,} segments more")
    return top
