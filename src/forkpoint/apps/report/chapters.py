"""A chapter for each input: a replay's folder, or a file of rollouts. Imports no torch."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkpoint.apps.replay.reading import PlannedBatch, read_manifest, read_plans, read_steps
from forkpoint.apps.replay.records import ReplayReport, ReplayStep
from forkpoint.apps.report.batches import (
    MAX_BATCHES,
    Batch,
    counted_schedule,
    forest_figure,
    group_names,
    groups_figure,
    measured_schedule,
    schedule_figure,
)
from forkpoint.apps.report.figure import Cell, Chapter, Figure, Table, Tile
from forkpoint.apps.report.steps import drift_figure, experts_figure, loss_figure, speed_figure
from forkpoint.apps.report.text import abbreviate, json_text
from forkpoint.apps.report.verdict import (
    gradients_tile,
    measured_speed_tile,
    memory_answer,
    predicted_speed_tile,
    tokens_tile,
)
from forkpoint.errors import ConfigError
from forkpoint.plan import Plan, Totals
from forkpoint.plan.device_memory import DeviceMemory
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.batch_tensors.identifiers import prompt_lengths
from forkpoint.units import exactly

MAX_GROUPS_IN_LABEL = 3
MAX_NAME_CHARACTERS = 100
"""Of the names of a group, a file and a kind of model."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A replay as its folder holds it; it may still be going on."""

    path: Path
    manifest: dict[str, Any]
    steps: tuple[ReplayStep, ...]
    planned: tuple[PlannedBatch, ...]
    """The first batches that ran, in order of first appearance."""
    batches: int
    """How many different batches have plans."""


def read_run(folder: Path) -> Run:
    """The replay in a folder, as far as it has come, with the plans of its first batches.

    Raises ConfigError where there is none, where it has no whole row yet, and for files that are
    not as forkpoint writes them, naming file, line and field.
    """
    manifest = read_manifest(folder)
    # Rows first: a replay that goes on meanwhile adds a batch's plans before the row that ran it.
    steps = read_steps(folder, manifest)
    if not steps:
        raise ConfigError(f"{folder} has no step yet. Wait for the replay's first row.")
    planned: list[PlannedBatch] = []
    batches = 0
    for batch in read_plans(folder, steps):
        batches += 1
        if len(planned) < MAX_BATCHES:
            planned.append(batch)
    return Run(
        path=folder, manifest=manifest, steps=tuple(steps), planned=tuple(planned), batches=batches
    )


def replay_chapter(run: Run) -> Chapter:
    """A chapter on the steps of a replay."""
    steps, manifest = run.steps, run.manifest
    measured = all(step.shared.peak_memory_bytes is not None for step in steps)
    budget = manifest["fixed"]["runs_on"]["memory_budget_bytes"]
    peaks = [
        # A budget is for what is predicted; what was measured has fitted.
        (step.shared.peak_memory_bytes, None)
        if measured
        else (step.shared.predicted_peak_bytes, budget)
        for step in steps
    ]
    memory, warnings = memory_answer(
        [(peak, limit) for peak, limit in peaks if peak is not None], measured=measured
    )
    totals = ReplayReport(steps=steps).to_dict()
    batches = [
        _replayed_batch(planned, step)
        for planned in run.planned
        # Without a step it was planned, and then interrupted before its first row.
        if (step := typical_step(steps, planned.fingerprint)) is not None
    ]
    left_out = run.batches - len(run.planned)
    figures = [
        forest_figure(batches, left_out),
        groups_figure(batches, left_out),
        schedule_figure(batches, left_out),
        speed_figure(steps),
        drift_figure(steps),
        loss_figure(steps),
        experts_figure(steps),
        environment_figure(manifest),
    ]
    tiles = (
        gradients_tile(steps, manifest),
        measured_speed_tile(totals["speedup"], totals["bound"]),
        tokens_tile(totals["computed_tokens"], totals["logical_tokens"], totals["left_out_tokens"]),
        memory,
    )
    asked = manifest["fixed"]["steps"]
    done = f"{len(steps):,} of {asked:,} steps so far" if len(steps) < asked else f"{asked:,} steps"
    compared = "dense beside shared" if steps[0].dense is not None else "shared alone"
    return Chapter(
        title=abbreviate(manifest["about"].get("file", run.path.name), MAX_NAME_CHARACTERS),
        subtitle=f"A replay of {done} on {model_name(manifest)}, {compared}.",
        tiles=tuple(tile for tile in tiles if tile is not None),
        warnings=warnings,
        figures=tuple(figure for figure in figures if figure is not None),
    )


def _replayed_batch(planned: PlannedBatch, step: ReplayStep) -> Batch:
    label = f"step {step.step}: {named_groups(planned.group_ids)}"
    lanes = [("shared", planned.shared, step.shared)]
    if planned.dense is not None and step.dense is not None:
        lanes.insert(0, ("dense", planned.dense, step.dense))
    return Batch(
        label=label,
        plan=planned.shared,
        group_ids=planned.group_ids,
        prompt_tokens=None,
        schedule=measured_schedule(label, lanes),
    )


def rollouts_chapter(
    name: str,
    batches: Iterable[tuple[RolloutBatch, Plan, Plan]],
    *,
    recorded: bool = False,
    device: DeviceMemory | None = None,
) -> Chapter:
    """A chapter on the savings of sharing on batches, from a plan and a dense plan of each.

    They are read one at a time, and the first MAX_BATCHES are drawn.

    Args:
        name: the file's.
        batches: rollouts, the plan and a dense plan of each batch.
        recorded: whether they are those of a trace, and not one file taken as one batch.
        device: the device that is planned for. The predicted peak is shown beside its memory, and
            a plan that needs more is warned of.
    """
    totals = Totals()
    peaks: list[tuple[int, int | None]] = []
    drawn: list[Batch] = []
    groups = trained = 0
    reason = ""
    name = abbreviate(name, MAX_NAME_CHARACTERS)
    for number, (batch, plan, dense) in enumerate(batches):
        totals.add(plan)
        if plan.predicted_peak_bytes is not None:
            peaks.append((plan.predicted_peak_bytes, plan.memory_budget_bytes))
        groups += len(batch.groups())
        trained += batch.trained_tokens
        reason = plan.reason
        if number >= MAX_BATCHES:
            continue
        label = f"all of {name}"
        if recorded:
            label = f"batch {number}: {named_groups(batch.group_ids)}"
        drawn.append(
            Batch(
                label=label,
                plan=plan,
                group_ids=group_names(batch),
                prompt_tokens=prompt_lengths(batch.loss_mask, batch.offsets).tolist(),
                schedule=counted_schedule(label, [("dense", dense), ("shared", plan)]),
            )
        )
    left_out = totals.batches - len(drawn)
    memory, warnings = memory_answer(peaks, device=device)
    tiles = (
        predicted_speed_tile(totals),
        tokens_tile(totals.computed_tokens, totals.logical_tokens, totals.left_out.tokens),
        memory,
        Tile(
            value=f"{totals.rollouts:,} rollouts",
            label=f"in {groups:,} group{'' if groups == 1 else 's'}",
            remark=f"{trained:,} trained tokens of {totals.logical_tokens:,} given.",
        ),
    )
    what = "rollouts, taken as one batch"
    if recorded:
        what = f"{totals.batches:,} recorded batches, each on its own"
    return Chapter(
        title=name,
        subtitle=f"What sharing would save on these {what}. Nothing was run.",
        tiles=tuple(tile for tile in tiles if tile is not None),
        warnings=warnings,
        figures=(
            forest_figure(drawn, left_out),
            groups_figure(drawn, left_out),
            schedule_figure(drawn, left_out),
            counts_figure(totals, groups, trained, reason),
        ),
    )


def counts_figure(totals: Totals, groups: int, trained: int, reason: str) -> Figure:
    """Sums over the plans of all batches."""
    rows: list[tuple[str, Cell]] = [
        ("batches", totals.batches),
        ("rollouts", totals.rollouts),
        ("groups", groups),
        ("tokens as given (logical)", totals.logical_tokens),
        ("tokens once in a batch (unique)", totals.unique_tokens),
        ("tokens without gradient, not run", totals.left_out.tokens),
        ("tokens run (edges)", totals.computed_tokens),
        ("trained tokens", trained),
        ("microbatches", totals.microbatches),
    ]
    for kind, count in totals.kinds.most_common():
        several = totals.batches > 1
        rows.append(
            (f"batches planned as {kind}", count) if several else ("plan", f"{kind}: {reason}")
        )
    unit = "tokens" if totals.shape is None else "FLOPs"
    rows.append((f"bound on the speed-up ({unit})", f"{totals.bound:.2f}x"))
    if totals.predicted_peak_bytes is not None:
        peak = exactly(totals.predicted_peak_bytes)
        rows.append(("predicted peak of activations and prefix cache, of any batch", peak))
    return Figure(
        name="counts",
        title="Counts",
        caption="From the token ids alone"
        + ("." if totals.shape is None else ", and the model's sizes."),
        table=Table(columns=("what", "value"), rows=rows),
    )


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
    shown = ", ".join(abbreviate(name, MAX_NAME_CHARACTERS) for name in names[:MAX_GROUPS_IN_LABEL])
    more = len(names) - MAX_GROUPS_IN_LABEL
    return f"{shown} and {more} more" if more > 0 else shown


def model_name(manifest: Mapping[str, Any]) -> str:
    """Such as "a llama (2 layers, 32 wide)"."""
    model = manifest["fixed"]["model"]
    config = model["config"] or {}
    sizes = [
        f"{config[key]:,} {word}"
        for key, word in (("num_hidden_layers", "layers"), ("hidden_size", "wide"))
        if type(config.get(key)) is int
    ]
    name = config.get("model_type")
    name = name if isinstance(name, str) and name else model["kind"]
    return f"a {abbreviate(name, MAX_NAME_CHARACTERS)}" + (
        f" ({', '.join(sizes)})" if sizes else ""
    )


def environment_figure(manifest: Mapping[str, Any]) -> Figure:
    """All that decides the numbers, and where they came from."""
    about, fixed = manifest["about"], manifest["fixed"]
    environment = about.get("environment", {})
    parts: dict[str, Mapping[str, Any]] = {
        "runs on": fixed["runs_on"],
        "version": {**about.get("versions", {}), **environment.get("versions", {})},
        **{part: fixed.get(part, {}) for part in ("optimizer", "rate", "config", "batches")},
        "router": fixed.get("router", {}),
        "model": {**(fixed["model"]["config"] or {}), **fixed["model"], "config": None},
    }
    rows: list[tuple[str, Any]] = [(name, about.get(name)) for name in ("command", "device")]
    rows += [("commit", environment.get("commit")), ("loss", fixed["loss"])]
    rows.append(("max_grad_norm", fixed["max_grad_norm"]))
    for part, values in parts.items():
        rows += [(f"{part}: {key}", value) for key, value in values.items()]
    return Figure(
        name="environment",
        title="Environment",
        caption="What decides these numbers. A replay that is resumed with anything else is "
        "refused.",
        table=Table(
            columns=("what", "value"),
            rows=[(abbreviate(n), json_text(v)) for n, v in rows if v is not None],
        ),
    )
