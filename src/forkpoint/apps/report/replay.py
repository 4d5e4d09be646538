"""A chapter on the folder of a replay. Imports no torch."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkpoint.apps.replay.folder import read_manifest, read_steps
from forkpoint.apps.replay.records import ReplayReport, ReplayStep
from forkpoint.apps.replay.trend import LIMIT, Trend, trend
from forkpoint.apps.report.draw import curves
from forkpoint.apps.report.page import Chapter, Figure, Tile
from forkpoint.apps.report.text import abbreviate, json_text
from forkpoint.errors import ConfigError
from forkpoint.units import format_bytes

MAX_NAME_CHARACTERS = 100
LEAST_STEPS = 20
"""Fewer steps say nothing about a trend."""
NORM_BARS = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
"""By dtype: how far gradient norms of equal weights may differ, relative to the norm. Models of
float64 still compute their RMS norms in float32, unless `verify` runs them."""
UNKNOWN_DTYPE = "a dtype that is not known", 2e-2
VERIFY = "forkpoint verify compares every parameter's gradient."


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
    steps, fixed, about = run.steps, run.manifest["fixed"], run.manifest["about"]
    totals = ReplayReport(steps=steps).to_dict()
    asked = fixed["steps"]
    done = f"{len(steps):,} of {asked:,} steps so far" if len(steps) < asked else f"{asked:,} steps"
    compared = "dense beside shared" if fixed["baseline"] else "shared alone"
    return Chapter(
        title=abbreviate(about.get("file", run.path.name), MAX_NAME_CHARACTERS),
        subtitle=f"A replay of {done} on {model_name(fixed['model'])}, {compared}.",
        tiles=[
            gradients_tile(steps, run.manifest),
            speed_tile(totals["speedup"], totals["bound"]),
            tokens_tile(totals),
            *memory_tiles(steps, fixed["runs_on"]["memory_budget_bytes"]),
        ],
        figures=[
            speed_figure(steps),
            *drift_figures(steps),
            loss_figure(steps),
            steps_figure(steps),
            environment_figure(run.manifest),
        ],
    )


def model_name(model: Mapping[str, Any]) -> str:
    """Such as "a llama (2 layers)"."""
    config = model["config"] or {}
    layers, name = config.get("num_hidden_layers"), config.get("model_type") or model["kind"]
    sizes = f" ({layers:,} layers)" if type(layers) is int else ""
    return f"a {abbreviate(str(name), MAX_NAME_CHARACTERS)}{sizes}"


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
    found, last = drift_trend(steps), steps[-1].difference
    doubtful = found is not None and not found.is_noise
    if last is not None:
        remark += (
            f"After {len(steps):,} steps the parameters differ by {last.rms:.1e}, having moved by "
            f"{last.rms_change:.1e} (rms){', with a trend' if doubtful else ''}. "
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


def drift_trend(steps: Sequence[ReplayStep]) -> Trend | None:
    """The trend of the mean parameter difference; None where there is too little to tell."""
    means = [step.difference.mean for step in steps if step.difference is not None]
    if len(means) < LEAST_STEPS or not all(abs(mean) < 1e100 for mean in means):
        return None
    return trend(means)


def speed_tile(speedup: float | None, bound: float) -> Tile:
    """The speed-up of all steps, if dense ran, beside its counted bound."""
    if speedup is None:
        how = "Counted in FLOPs. Dense, which is ordinary training, was not run."
        return Tile(value=f"at most {bound:.2f}x", label="faster than dense", remark=how)
    limit = f"; counted bound {bound:.2f}x" if speedup > bound else f", of at most {bound:.2f}x"
    return Tile(
        value=f"{speedup:.2f}x faster" if speedup >= 1 else f"{1 / speedup:.2f}x slower",
        label="than dense" + limit,
        remark="Measured over all steps, the first with its warm-up included.",
        state="good" if speedup >= 1 else "bad",
    )


def tokens_tile(totals: Mapping[str, Any]) -> Tile:
    """Tokens computed of those given that give a gradient."""
    computed, given = totals["computed_tokens"], totals["logical_tokens"]
    gradient = given - totals["left_out_tokens"]
    of = f"{given:,} given"
    if gradient < given:
        of = f"{gradient:,} that give a gradient ({of})"
    return Tile(
        value=f"{computed / max(1, gradient):.1%}",
        label="of the tokens computed",
        remark=f"{computed:,} of {of}. The rest are shared, and computed once.",
    )


def memory_tiles(steps: Sequence[ReplayStep], budget: int | None) -> list[Tile]:
    """The largest peak, measured or else predicted, beside the budget that plans were made for;
    no tile where it is not known."""
    names = {"Measured": "peak_memory_bytes", "Predicted": "predicted_peak_bytes"}
    peaks = {
        how: [peak for step in steps if (peak := getattr(step.shared, name)) is not None]
        for how, name in names.items()
    }
    how = "Measured" if peaks["Measured"] else "Predicted"
    if not peaks[how]:
        return []
    most = max(peaks[how])
    of_budget = "" if budget is None else f", of a budget of {format_bytes(budget)}"
    return [
        Tile(
            value=format_bytes(most),
            label=f"of memory at the peak{of_budget}",
            remark=f"{how}: activations and prefix cache at the worst moment. Weights, their "
            "gradients and the optimizer are added.",
            state="plain" if budget is None or most <= budget else "bad",
        )
    ]


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
        lines["shared speed-up"] = ratios
        caption = (
            f"Median speed-up of a step {statistics.median(ratios):.2f}x. {caption} Dense is "
            "packed microbatches with the same head, kernels and loss. The first step includes "
            "warm-up."
        )
    pictures = [
        curves(x, "speed-up", lines, dots=True, log=True),
        curves(x, "step, ms", times, dots=True, log=True),
    ]
    title = "Speed-up against the bound"
    return Figure(name="speed", title=title, caption=caption, pictures=pictures)


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
    pictures = [
        curves(x, "mean difference", {"shared": [d.mean for d in apart]}, band=band),
        curves(x, "difference", sizes, log=True),
    ]
    caption = (
        "Parameters of the shared model less those of the dense model, over all elements, after "
        f"each step. Rounding averages out; a bias would not. {verdict}"
    )
    title = "Drift of the parameters"
    return [Figure(name="drift", title=title, caption=caption, pictures=pictures)]


def loss_figure(steps: Sequence[ReplayStep]) -> Figure:
    """Losses and gradient norms, dense and shared, and how the losses differ."""
    x, losses = [step.step for step in steps], _both(steps, "loss")
    lines = {"loss": losses, "gradient norm": _both(steps, "gradient_norm")}
    if "dense" in losses:
        apart = [s - d for s, d in zip(losses["shared"], losses["dense"], strict=True)]
        lines["loss difference"] = {"difference": apart}
    if any(step.shared.router_loss is not None for step in steps):
        lines["router loss"] = _both(steps, "router_loss")
    pictures = [curves(x, label, of) for label, of in lines.items()]
    caption = "Of each step, before its update."
    title = "Losses and gradient norms"
    return Figure(name="losses", title=title, caption=caption, pictures=pictures)


def steps_figure(steps: Sequence[ReplayStep]) -> Figure:
    """The table of steps."""
    columns = ["step", "tokens given", "tokens run", "bound", "shared (ms)", "loss", "norm"]
    if steps[0].dense is not None:
        columns += ["dense (ms)", "speed-up", "dense loss", "dense norm", "mean difference"]
        columns += ["rms", "largest", "dense since the start (rms)"]
    rows: list[list[Any]] = []
    for step in steps:
        shared, dense, apart = step.shared, step.dense, step.difference
        row = [step.step, step.logical_tokens, shared.computed_tokens, step.bound, shared.ms]
        row += [shared.loss, shared.gradient_norm]
        if dense is not None and apart is not None:
            row += [dense.ms, dense.ms / shared.ms, dense.loss, dense.gradient_norm]
            row += [apart.mean, apart.rms, apart.max, apart.rms_change]
        rows.append(row)
    return Figure(name="steps", title="Steps", columns=columns, rows=rows)


def environment_figure(manifest: Mapping[str, Any]) -> Figure:
    """The settings that decide the numbers, and where they came from."""
    about, fixed = manifest["about"], manifest["fixed"]
    model = {**(fixed["model"]["config"] or {}), **fixed["model"], "config": None}
    rows: list[tuple[str, str]] = []
    for name, value in {**about, **fixed, "model": model, "options": None}.items():
        entries = value.items() if isinstance(value, dict) else [("", value)]
        named = ((f"{name}: {key}".removesuffix(": "), entry) for key, entry in entries)
        rows += [(abbreviate(n), json_text(entry)) for n, entry in named if entry is not None]
    caption = "A replay that is resumed with other settings is refused."
    columns = ("name", "value")
    return Figure(
        name="environment", title="Environment", caption=caption, columns=columns, rows=rows
    )
