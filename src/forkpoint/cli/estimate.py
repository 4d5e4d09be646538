"""An estimate as tables, and as what the JSON line has. Imports no torch."""

from typing import Any

from rich.table import Table

from forkpoint.plan import Estimate
from forkpoint.plan.estimate import Distribution, Split

NAMES = {
    "none": "nobody shares (dense)",
    "group": "each group shares",
    "tree": "each batch shares (tree)",
}


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
    columns = ["", "distinct tokens", "tokens run", "of dense", "TFLOP", "speed-up at most"]
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
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
            "-" if values["flops"] is None else f"{values['flops'] / 1e12:,.3f}",
            f"{values['bound']:.2f}x",
        )
    unit = "tokens" if estimate.shape is None else "FLOPs"
    table.caption = f"forward and backward; the speed-up is counted in {unit}"
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
    """What batches cut into parts would run, and how much more that is than uncut."""
    rows = []
    for split, tokens in _cutting(estimate):
        row: dict[str, Any] = {"kind": split.kind, "count": split.count}
        for mode in ("group", "tree"):
            whole = max(1, estimate.work[mode].tokens)
            row |= {f"{mode}_tokens": tokens[mode], f"{mode}_more": tokens[mode] / whole - 1}
        rows.append(row)
    return rows


def split_table(estimate: Estimate) -> Table:
    table = Table(title="tokens run where a batch is cut, and more than uncut")
    for column in ("parts share nothing with each other", "groups share", "", "batches share", ""):
        table.add_column(column, justify="left" if column.startswith("parts") else "right")
    for row in splits(estimate):
        count = row["count"]
        kinds = {
            "microbatch": f"microbatches of {count}, in the order of the file",
            "ranks": f"{count} ranks, consecutive rollouts each",
            "ranks, dealt in turn": f"{count} ranks, rollouts dealt in turn",
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
