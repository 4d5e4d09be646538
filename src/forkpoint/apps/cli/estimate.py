"""Sums over many batches, as tables and as fields of the JSON line. Imports no torch."""

from typing import Any

from rich.table import Table

from forkpoint.plan import Estimate, Totals
from forkpoint.plan.estimate import Distribution, Split
from forkpoint.plan.plan import flops_text
from forkpoint.units import shown

NAMES = {"none": "nobody (dense)", "group": "each group", "tree": "each batch (tree)"}


def totals_table(totals: Totals, groups: int) -> Table:
    """The plans of several batches in one table."""
    table = Table(
        title=f"{totals.batches:,} batches, each with a plan of its own", show_header=False
    )
    table.add_column()
    table.add_column(justify="right")
    add = table.add_row
    add("rollouts, groups", f"{totals.rollouts:,}, {groups:,}")
    add("logical tokens (as given)", f"{totals.logical_tokens:,}")
    add("unique tokens (once in each batch)", f"{totals.unique_tokens:,}")
    if totals.left_out.tokens:
        add("tokens without gradient, not run", f"{totals.left_out.tokens:,}")
    add("computed tokens (edges run)", f"{totals.computed_tokens:,}")
    if totals.padding:
        add("padding run besides", f"{totals.padding:,}")
    add("microbatches", f"{totals.microbatches:,}")
    for kind, count in totals.kinds.most_common():
        add(f"planned as {kind}", f"{count:,} of {totals.batches:,}")
    if totals.shape is not None and totals.dense is not None and totals.shared is not None:
        add("FLOPs of dense steps", flops_text(totals.dense.step_flops(totals.shape)))
        add("FLOPs of these steps", flops_text(totals.shared.step_flops(totals.shape)))
    if totals.predicted_peak_bytes is not None:
        add("activations and prefix cache at the worst peak", shown(totals.predicted_peak_bytes))
    if totals.predicted_ms is not None:
        add("predicted time of all steps, ms", f"{totals.predicted_ms:,.1f}")
    if totals.shape is not None:
        add("predictions rest on", totals.rests_on or "counted FLOPs and bytes")
    if totals.predicted_speedup is not None:
        add("predicted speed-up, padding included", f"{totals.predicted_speedup:.2f}x")
    unit = "FLOPs" if totals.shape is not None else "tokens"
    add(f"bound on the speed-up ({unit})", f"{totals.bound:.2f}x")
    return table


def modes(estimate: Estimate) -> dict[str, dict[str, Any]]:
    """For each way of sharing: tokens run, FLOPs of forward and backward, and the speed-up."""
    shape = estimate.shape
    return {
        mode: {
            "tokens": work.tokens,
            "labelled": work.labelled,
            "flops": None if shape is None else work.step_flops(shape),
            "bound": estimate.bound(mode),
        }
        for mode, work in estimate.work.items()
    }


def mode_table(estimate: Estimate, name: str) -> Table:
    table = Table(title=f"what sharing saves on {name}")
    columns = ["who shares", "distinct", "tokens run", "of dense", "FLOPs", "speed-up"]
    for column in columns:
        table.add_column(column, justify="left" if column == "who shares" else "right")
    dense = max(1, estimate.work["none"].tokens)
    distinct = {
        "none": estimate.logical_tokens,
        "group": estimate.group_tokens,
        "tree": estimate.unique_tokens,
    }
    for mode, values in modes(estimate).items():
        table.add_row(
            NAMES[mode],
            f"{distinct[mode]:,}",
            f"{values['tokens']:,}",
            f"{values['tokens'] / dense:.1%}",
            "-" if values["flops"] is None else flops_text(values["flops"]),
            f"{values['bound']:.2f}x",
        )
    unit = "tokens" if estimate.shape is None else "FLOPs"
    table.caption = f"forward and backward; at most that speed-up, counted in {unit}"
    if dense < estimate.logical_tokens - estimate.rollouts:
        table.caption += "; tokens without gradient are run by none of them"
    return table


def _distributions(estimate: Estimate) -> dict[str, Distribution]:
    return {
        "prefix_ratio": estimate.prefix_ratio,
        "group_size": estimate.group_size,
        "group_depth": estimate.group_depth,
        "tree_depth": estimate.tree_depth,
    }


def distributions(estimate: Estimate) -> dict[str, dict[str, float]]:
    return {name: found.summary() for name, found in _distributions(estimate).items()}


def distribution_table(estimate: Estimate) -> Table:
    table = Table(title="how rollouts share")
    texts = {
        "prefix_ratio": "of a rollout, shared in its group",
        "group_size": "rollouts of a group",
        "group_depth": "segments of a rollout, groups sharing",
        "tree_depth": "segments of a rollout, batches sharing",
    }
    for column in ("", "mean", "p10", "p50", "p90", "max"):
        table.add_column(column, justify="right" if column else "left")
    for name, values in distributions(estimate).items():
        share = name == "prefix_ratio"
        cells = [
            f"{value:.1%}" if share else f"{value:,.1f}" if key == "mean" else f"{value:,.0f}"
            for key, value in values.items()
        ]
        table.add_row(texts[name], *cells)
    return table


def splits(estimate: Estimate) -> list[dict[str, Any]]:
    """Tokens that batches cut into parts would run, and how many more than uncut."""
    rows = []
    for split, tokens in _cutting(estimate):
        row: dict[str, Any] = {"kind": split.kind, "count": split.count}
        for mode in ("group", "tree"):
            whole = max(1, estimate.work[mode].tokens)
            row |= {f"{mode}_tokens": tokens[mode], f"{mode}_more": tokens[mode] / whole - 1}
        rows.append(row)
    return rows


def split_table(estimate: Estimate) -> Table:
    table = Table(title="tokens run where a batch is cut (parts share nothing), more than uncut")
    for column in ("cut into", "groups share", "", "batches share", ""):
        table.add_column(column, justify="left" if column == "cut into" else "right")
    for row in splits(estimate):
        count = row["count"]
        kinds = {
            "microbatch": f"parts of {count} rollout{'' if count == 1 else 's'}, in order",
            "ranks": f"{count} ranks, consecutive parts",
            "ranks, dealt in turn": f"{count} ranks, dealt in turn",
        }
        table.add_row(
            kinds[row["kind"]],
            f"{row['group_tokens']:,}",
            f"+{row['group_more']:.0%}",
            f"{row['tree_tokens']:,}",
            f"+{row['tree_more']:.0%}",
        )
    return table


def _cutting(estimate: Estimate) -> list[tuple[Split, dict[str, int]]]:
    """The splits that cut batches of this size at all."""
    most = estimate.rollouts / estimate.batches
    return [(split, t) for split, t in estimate.split_tokens.items() if split.count < most]
