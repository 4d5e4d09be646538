"""A chapter on the folder of a replay. Imports no torch."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkpoint.apps.replay.folder import read_manifest, read_steps
from forkpoint.apps.replay.records import ReplayReport, ReplayStep, StepRecord
from forkpoint.apps.replay.trend import LIMIT
from forkpoint.apps.report.draw import PHASES, curves, schedule
from forkpoint.apps.report.page import Chapter, Figure
from forkpoint.apps.report.text import abbreviate, json_text
from forkpoint.apps.report.verdict import (
    drift_trend,
    gradients_tile,
    measured_speed_tile,
    memory_tiles,
    tokens_tile,
)
from forkpoint.errors import ConfigError

MAX_EVENTS = 500
"""That are drawn of one step."""
MAX_NAME_CHARACTERS = 100
UNUSUAL = 4
"""Multiple of the median from which times are not drawn, such as those of compilation."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A replay as its folder holds it; it may still be going on."""

    path: Path
    manifest: dict[str, Any]
    steps: tuple[ReplayStep, ...]


def read_run(folder: Path) -> Run:
    """The replay in a folder, as far as it has come.

    Raises ConfigError where there is none, where it has no whole row yet, and for files that are
    not as forkpoint writes them, naming file, line and field.
    """
    manifest = read_manifest(folder)
    steps = read_steps(folder, manifest)
    if not steps:
        raise ConfigError(f"{folder} has no step yet. Wait for the replay's first row.")
    return Run(path=folder, manifest=manifest, steps=tuple(steps))


def replay_chapter(run: Run) -> Chapter:
    """A chapter on the steps of a replay."""
    steps, manifest = run.steps, run.manifest
    totals = ReplayReport(steps=steps).to_dict()
    measured = totals["shared_peak_memory_bytes"]
    predicted = [step.shared.predicted_peak_bytes for step in steps]
    memory = memory_tiles(
        # A budget is for what is predicted; what was measured has fitted.
        measured or max((peak for peak in predicted if peak is not None), default=None),
        measured=measured is not None,
        budget=None if measured else manifest["fixed"]["runs_on"]["memory_budget_bytes"],
    )
    figures = [
        speed_figure(steps),
        *drift_figures(steps),
        loss_figure(steps),
        schedule_figure(steps),
        steps_figure(steps),
        environment_figure(manifest),
    ]
    asked = manifest["fixed"]["steps"]
    done = f"{len(steps):,} of {asked:,} steps so far" if len(steps) < asked else f"{asked:,} steps"
    compared = "dense beside shared" if manifest["fixed"]["baseline"] else "shared alone"
    return Chapter(
        title=abbreviate(manifest["about"].get("file", run.path.name), MAX_NAME_CHARACTERS),
        subtitle=f"A replay of {done} on {model_name(manifest)}, {compared}.",
        tiles=[
            gradients_tile(steps, manifest),
            measured_speed_tile(totals["speedup"], totals["bound"]),
            tokens_tile(
                totals["computed_tokens"], totals["logical_tokens"], totals["left_out_tokens"]
            ),
            *memory,
        ],
        figures=figures,
    )


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
    of_sizes = f" ({', '.join(sizes)})" if sizes else ""
    return f"a {abbreviate(name, MAX_NAME_CHARACTERS)}{of_sizes}"


# Figures
# ------------------------------------------------------------


def _both(steps: Sequence[ReplayStep], name: str) -> dict[str, list[Any]]:
    """A value of dense, if it ran, and of shared, for each step."""
    found: dict[str, list[Any]] = {}
    if steps[0].dense is not None:
        found["dense"] = [getattr(step.dense, name) for step in steps]
    return {**found, "shared": [getattr(step.shared, name) for step in steps]}


def speed_figure(steps: Sequence[ReplayStep]) -> Figure:
    """Step times, and where dense ran their ratio beside the counted bound."""
    x, times = [step.step for step in steps], _both(steps, "ms")
    lines: dict[str, Sequence[float | None]] = {"bound": [step.bound for step in steps]}
    caption = "The bound is the counted FLOPs of dense training over those of the tokens run."
    if "dense" in times:
        ratios = [d / s for d, s in zip(times["dense"], times["shared"], strict=True)]
        lines["shared speed-up"] = _usual(ratios)[0]
        median = statistics.median(ratios)
        caption = (
            f"Median speed-up of a step {median:.2f}x. {caption} Dense is packed microbatches with "
            "the same head, kernels and loss. The first step includes warm-up."
        )
    drawn = {name: _usual(values) for name, values in times.items()}
    unusual = sum(count for _, count in drawn.values())
    note = f"Not drawn: {unusual} step times above {UNUSUAL} times the median."
    usual = {name: values for name, (values, _) in drawn.items()}
    return Figure(
        name="speed",
        title="Speed-up against the bound",
        caption=caption,
        pictures=[
            curves(x, "speed-up", lines, dots=True),
            curves(x, "step, ms", usual, dots=True),
        ],
        notes=[note] * bool(unusual),
    )


def _usual(values: Sequence[float]) -> tuple[list[float | None], int]:
    """Values without those far above the median, and how many these are."""
    most = UNUSUAL * statistics.median(values)
    kept = [value if value <= most else None for value in values]
    return kept, kept.count(None)


def drift_figures(steps: Sequence[ReplayStep]) -> list[Figure]:
    """Differences of the parameters after each step; none without a baseline."""
    apart = [step.difference for step in steps if step.difference is not None]
    if not apart:
        return []
    x, found = [step.step for step in steps], drift_trend(steps)
    band, verdict = None, "There are too few steps, or numbers that are not finite, for a trend."
    if found is not None:
        # The standard error of a mean over n gains is the walk's spread over n steps, divided by n.
        spread = found.standard_error * math.sqrt(found.steps)
        band = [LIMIT * spread * math.sqrt(step) for step in x]
        verdict = (
            f"The mean changes by {found.slope:.1e} a step, {abs(found.errors):.1f} standard "
            f"errors: {'no trend' if found.is_noise else 'a trend'} (noise is up to {LIMIT})."
        )
    sizes = {
        "dense since the start (rms)": [d.rms_change for d in apart],
        "difference (largest)": [d.max for d in apart],
        "shared less dense (rms)": [d.rms for d in apart],
    }
    return [
        Figure(
            name="drift",
            title="Drift of the parameters",
            caption="Parameters of the shared model less those of the dense model, over all "
            f"elements, after each step. Rounding averages out; a bias would not. {verdict}",
            pictures=[
                curves(x, "mean difference", {"shared": [d.mean for d in apart]}, band=band),
                curves(x, "difference", sizes, log=True),
            ],
        )
    ]


def loss_figure(steps: Sequence[ReplayStep]) -> Figure:
    """Losses and gradient norms, dense and shared, and how the losses differ."""
    x, losses = [step.step for step in steps], _both(steps, "loss")
    pictures = [
        curves(x, "loss", losses),
        curves(x, "gradient norm", _both(steps, "gradient_norm")),
    ]
    if "dense" in losses:
        apart = [s - d for s, d in zip(losses["shared"], losses["dense"], strict=True)]
        pictures.append(curves(x, "loss difference", {"difference": apart}))
    if any(step.shared.router_loss is not None for step in steps):
        pictures.append(curves(x, "router loss", _both(steps, "router_loss")))
    return Figure(
        name="losses",
        title="Losses and gradient norms",
        caption="Of each step, before its update.",
        pictures=pictures,
    )


def schedule_figure(steps: Sequence[ReplayStep]) -> Figure:
    """The events of the step of median time, dense and shared."""
    step = typical_step(steps)
    records = {"dense": step.dense, "shared": step.shared}
    lanes = {name: _events(record) for name, record in records.items() if record is not None}
    many = max(len(record.events) for record in records.values() if record) > MAX_EVENTS
    note = f"The first {MAX_EVENTS} events of a step are drawn one by one."
    return Figure(
        name="schedule",
        title="The schedule",
        caption="Forwards and backwards of microbatches in the order in which they ran. Others "
        "read the cache of a prefix; none reads that of a leaf. Other time is planning and the "
        "optimizer.",
        pictures=[schedule(f"step {step.step}", lanes)],
        notes=[note] * many,
    )


def typical_step(steps: Sequence[ReplayStep]) -> ReplayStep:
    """The step of median time, the first left out if it can be, because it includes warm-up."""
    found = steps[1:] or steps
    return sorted(found, key=lambda step: step.shared.ms)[(len(found) - 1) // 2]


def _events(record: StepRecord) -> list[tuple[str, float]]:
    """Phase and milliseconds of each event, and of the rest of the step."""
    found = []
    for name, ms in zip(record.events[:MAX_EVENTS], record.event_ms, strict=False):
        operation, _, microbatch = name.partition(" ")
        kind = microbatch.partition(" ")[0]
        phase = operation if operation == "score" else f"{kind} {operation}"
        found.append((phase if phase in PHASES else "other", ms))
    return [*found, ("other", max(0.0, record.ms - sum(ms for _, ms in found)))]


def steps_figure(steps: Sequence[ReplayStep]) -> Figure:
    """The table of steps."""
    columns = ["step", "tokens given", "tokens run", "bound", "shared (ms)", "loss", "norm"]
    rows: list[list[Any]] = []
    for step in steps:
        one = step.shared
        row = [step.step, step.logical_tokens, one.computed_tokens, step.bound, one.ms]
        rows.append([*row, one.loss, one.gradient_norm])
    if steps[0].dense is not None:
        columns += ["dense (ms)", "speed-up", "dense loss", "dense norm", "mean difference"]
        columns += ["rms", "largest", "dense since the start (rms)"]
        for row, step in zip(rows, steps, strict=True):
            d, apart = step.dense, step.difference
            assert d is not None and apart is not None
            row += [d.ms, d.ms / step.shared.ms, d.loss, d.gradient_norm]
            row += [apart.mean, apart.rms, apart.max, apart.rms_change]
    return Figure(name="steps", title="Steps", columns=columns, rows=rows)


def environment_figure(manifest: Mapping[str, Any]) -> Figure:
    """The settings that decide the numbers, and where they came from."""
    about, fixed = manifest["about"], manifest["fixed"]
    model = {**(fixed["model"]["config"] or {}), **fixed["model"], "config": None}
    rows: list[tuple[str, Any]] = []
    for name, value in {**about, **fixed, "model": model, "options": None}.items():
        entries = value.items() if isinstance(value, dict) else [("", value)]
        rows += [(f"{name}: {key}".removesuffix(": "), entry) for key, entry in entries]
    return Figure(
        name="environment",
        title="Environment",
        caption="A replay that is resumed with other settings is refused.",
        columns=("name", "value"),
        rows=[(abbreviate(n), json_text(v)) for n, v in rows if v is not None],
    )
