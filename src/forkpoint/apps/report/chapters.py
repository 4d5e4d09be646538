"""A chapter for each input: a replay's folder, or a file of rollouts. Imports no torch."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from forkpoint.apps.replay.records import ReplayReport, ReplayStep
from forkpoint.apps.report.curves import drift_figure, loss_figure, speed_figure
from forkpoint.apps.report.experts import experts_figure
from forkpoint.apps.report.figure import Chapter, Figure, Table, Tile
from forkpoint.apps.report.forests import draw_forest, forest_figure
from forkpoint.apps.report.groups import group_names, groups_figure
from forkpoint.apps.report.runs import MOST_BATCHES, Run
from forkpoint.apps.report.schedules import (
    counted_lane,
    measured_lane,
    timeline_figure,
)
from forkpoint.apps.report.text import cut, shown
from forkpoint.apps.report.verdict import (
    Peak,
    gradients_tile,
    measured_speed_tile,
    predicted_speed_tile,
    tokens_tile,
)
from forkpoint.plan import Plan, Totals
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.batch_tensors.identifiers import prompt_lengths
from forkpoint.units import exactly

MOST_GROUPS_NAMED = 3
MOST_NAME_CHARACTERS = 100
"""Of the names of a group, a file and a kind of model."""


def replay_chapter(run: Run, *, device_memory_bytes: int | None = None) -> Chapter:
    """Chapters on the steps of a replay.

    `device_memory_bytes` is all the memory of the device, which the peak is shown beside.
    """
    steps = run.steps
    peak = Peak(measured=all(step.shared.peak_memory_bytes is not None for step in steps))
    budget = run.manifest["fixed"]["runs_on"]["memory_budget_bytes"]
    for step in steps:
        # A budget is for what is predicted; what was measured has fitted.
        if peak.measured:
            peak.add(step.shared.peak_memory_bytes, None, None)
        else:
            peak.add(step.shared.predicted_peak_bytes, budget, device_memory_bytes)
    totals = ReplayReport(steps=steps).to_dict()
    left_out = run.batches - len(run.planned)
    forests, timelines = [], []
    for planned in run.planned:
        step = typical_step(steps, planned.fingerprint)
        if step is None:
            continue  # planned, and then interrupted before its first row
        label = f"step {step.step}: {named_groups(planned.group_ids)}"
        picture = draw_forest(planned.shared, planned.rollout_ids, planned.group_ids)
        forests.append((label, picture))
        lanes = [measured_lane("shared", planned.shared, step.shared)]
        if planned.dense is not None and step.dense is not None:
            lanes.insert(0, measured_lane("dense", planned.dense, step.dense))
        timelines.append((label, lanes))
    figures = [
        forest_figure(forests, left_out),
        groups_figure(forests, left_out),
        timeline_figure(timelines, left_out),
        speed_figure(steps),
        drift_figure(steps),
        loss_figure(steps),
        experts_figure(steps),
        environment_figure(run.manifest),
    ]
    about = run.manifest["about"]
    done = f"{len(steps):,} steps"
    if len(steps) < run.steps_asked:
        done = f"{len(steps):,} of {run.steps_asked:,} steps so far"
    return Chapter(
        title=cut(about.get("file", run.path.name), MOST_NAME_CHARACTERS),
        subtitle=f"A replay of {done} on {model_name(run.manifest)}, "
        + ("dense beside shared." if steps[0].dense is not None else "shared alone."),
        tiles=replay_tiles(run, totals, peak.tile(device_memory_bytes)),
        warnings=peak.warnings(),
        figures=tuple(figure for figure in figures if figure is not None),
    )


def rollouts_chapter(
    name: str,
    batches: Iterable[tuple[RolloutBatch, Plan, Plan]],
    *,
    recorded: bool = False,
    device_memory_bytes: int | None = None,
    besides_bytes: int | None = None,
) -> Chapter:
    """Chapters on the savings of sharing on batches, from a plan and a dense plan of each.

    They are read one at a time, and the first MOST_BATCHES are drawn.

    Args:
        name: the file's.
        batches: rollouts, the plan and a dense plan of each batch.
        recorded: whether they are those of a trace, and not one file taken as one batch.
        device_memory_bytes: all the memory of the device. The predicted peak is shown beside it,
            and a plan that needs more is warned of.
        besides_bytes: what weights, gradients, the optimizer and a margin take of it; None where
            that is not known.
    """
    totals, peak = Totals(), Peak(besides_bytes=besides_bytes)
    groups = trained = 0
    reason = ""
    forests, timelines = [], []
    for number, (batch, plan, dense) in enumerate(batches):
        totals.add(plan)
        peak.add(plan.predicted_peak_bytes, plan.memory_budget_bytes, device_memory_bytes)
        groups += len(batch.groups())
        trained += batch.trained_tokens
        reason = plan.reason
        if number >= MOST_BATCHES:
            continue
        of_batch = f"batch {number}: {named_groups(batch.group_ids)}"
        label = of_batch if recorded else f"all of {cut(name, MOST_NAME_CHARACTERS)}"
        lanes = [counted_lane(way, made) for way, made in (("dense", dense), ("shared", plan))]
        prompts = prompt_lengths(batch.loss_mask, batch.offsets).tolist()
        forests.append((label, draw_forest(plan, batch.rollout_ids, group_names(batch), prompts)))
        timelines.append((label, lanes))
    left_out = totals.batches - len(forests)
    what = f"{totals.batches:,} recorded batches, each on its own"
    if not recorded:
        what = "rollouts, taken as one batch"
    return Chapter(
        title=cut(name, MOST_NAME_CHARACTERS),
        subtitle=f"What sharing would save on these {what}. Nothing was run.",
        tiles=tuple(
            tile
            for tile in (
                predicted_speed_tile(totals),
                tokens_tile(totals.computed_tokens, totals.logical_tokens, totals.left_out.tokens),
                peak.tile(device_memory_bytes),
                Tile(
                    value=f"{totals.rollouts:,} rollouts",
                    label=f"in {groups:,} group{'' if groups == 1 else 's'}",
                    remark=f"{trained:,} trained tokens of {totals.logical_tokens:,} given.",
                ),
            )
            if tile is not None
        ),
        warnings=peak.warnings(),
        figures=(
            forest_figure(forests, left_out),
            groups_figure(forests, left_out),
            timeline_figure(timelines, left_out),
            _counts_figure(totals, groups, trained, reason),
        ),
    )


def _unit(totals: Totals) -> str:
    return "tokens" if totals.shape is None else "FLOPs"


def _counts_figure(totals: Totals, groups: int, trained: int, reason: str) -> Figure:
    several = totals.batches > 1
    counts: list[tuple[str, float | str]] = [("batches", totals.batches)] if several else []
    counts += [
        ("rollouts", totals.rollouts),
        ("groups", groups),
        ("tokens as given (logical)", totals.logical_tokens),
        (
            f"tokens once in {'each' if several else 'the whole'} batch (unique)",
            totals.unique_tokens,
        ),
        *(
            [("tokens without gradient, not run", totals.left_out.tokens)]
            if totals.left_out.tokens
            else []
        ),
        ("tokens run (edges)", totals.computed_tokens),
        ("trained tokens", trained),
        ("microbatches", totals.microbatches),
    ]
    for kind, count in totals.kinds.most_common():
        counts.append(
            (f"batches planned as {kind}", count) if several else ("plan", f"{kind}: {reason}")
        )
    counts.append((f"bound on the speed-up ({_unit(totals)})", f"{totals.bound:.2f}x"))
    if totals.predicted_peak_bytes is not None:
        of = ", the largest of any batch" if several else ""
        peak = exactly(totals.predicted_peak_bytes)
        counts.append((f"predicted peak of activations and prefix cache{of}", peak))
    return Figure(
        name="counts",
        title="Counts",
        caption="From the token ids alone"
        + ("." if totals.shape is None else ", and the model's sizes."),
        kind="table",
        table=Table(columns=("what", "value"), rows=counts),
    )


def replay_tiles(run: Run, totals: dict[str, Any], memory: Tile | None) -> tuple[Tile, ...]:
    """The answers of a replay: gradients, speed, tokens, memory."""
    steps = run.steps
    tiles = [
        gradients_tile(steps, run.manifest),
        measured_speed_tile(totals["speedup"], totals["bound"]),
        tokens_tile(totals["computed_tokens"], totals["logical_tokens"], totals["left_out_tokens"]),
    ]
    if memory is not None:
        tiles.append(memory)
    return tuple(tiles)


def typical_step(steps: Sequence[ReplayStep], fingerprint: str) -> ReplayStep | None:
    """The step of median time on a batch, the warm-up of the first step left out if it can be."""
    found = [step for step in steps if step.fingerprint == fingerprint]
    found = [step for step in found if step.step > 1] or found
    if not found:
        return None
    median = statistics.median_low([step.shared.ms for step in found])
    return next(step for step in found if step.shared.ms == median)


def named_groups(group_ids: Sequence[str | None]) -> str:
    """The groups of a batch, the first few of many."""
    names = list(dict.fromkeys("no group" if name is None else name for name in group_ids))
    more = f" and {len(names) - MOST_GROUPS_NAMED} more" if len(names) > MOST_GROUPS_NAMED else ""
    return ", ".join(cut(name, MOST_NAME_CHARACTERS) for name in names[:MOST_GROUPS_NAMED]) + more


def model_name(manifest: dict[str, Any]) -> str:
    model = manifest["fixed"]["model"]
    config = model["config"] or {}
    sizes = [
        f"{config[key]:,} {word}"
        for key, word in (("num_hidden_layers", "layers"), ("hidden_size", "wide"))
        if type(config.get(key)) is int
    ]
    name = config.get("model_type")
    name = cut(name if isinstance(name, str) and name else model["kind"], MOST_NAME_CHARACTERS)
    return f"a {name} ({', '.join(sizes)})" if sizes else f"a {name}"


def environment_figure(manifest: dict[str, Any]) -> Figure:
    """All that decides the numbers, and where they came from."""
    about, fixed = manifest["about"], manifest["fixed"]
    rows: list[tuple[str, Any]] = [(name, about.get(name)) for name in ("command", "device")]
    rows += [(f"runs on: {key}", value) for key, value in fixed["runs_on"].items()]
    environment = about.get("environment", {})
    rows.append(("commit", environment.get("commit")))
    versions = {**about.get("versions", {}), **environment.get("versions", {})}
    rows += [(f"version: {key}", value) for key, value in versions.items()]
    rows = [(name, value) for name, value in rows if value]
    rows.append(("loss", fixed["loss"]))
    for part in ("optimizer", "rate", "config", "batches", "router"):
        rows += [(f"{part}: {key}", value) for key, value in fixed.get(part, {}).items()]
    rows.append(("max_grad_norm", fixed["max_grad_norm"]))
    model = fixed["model"]
    rows += [
        (f"model: {key}", value)
        for key, value in {**(model["config"] or {}), **model}.items()
        if key != "config" and isinstance(value, str | int | float)
    ]
    return Figure(
        name="environment",
        title="Environment",
        caption="What decides these numbers. A replay that is resumed with anything else is "
        "refused.",
        kind="table",
        table=Table(
            columns=("what", "value"), rows=[(cut(name), shown(value)) for name, value in rows]
        ),
    )
