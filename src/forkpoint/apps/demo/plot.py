"""The plot of a run, and the rows that it is drawn from."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from forkpoint.apps.cli.output import plain
from forkpoint.apps.demo.loop import Step, Task
from forkpoint.apps.demo.task import BLIND_REWARD
from forkpoint.errors import ConfigError

ROWS = "demo.jsonl"
PLOT = "demo.png"
REWARD, SHARED, DENSE, GREY = "#1b7f5c", "#1f5fbf", "#c8601a", "#767676"
MOST_TICKS = 12


def check_folder(folder: Path) -> None:
    """Make the folder if there is none, and refuse one that the results cannot be written to.

    Raises ConfigError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder / ROWS, folder / PLOT):
            new = not path.exists()
            path.open("ab").close()
            if new:
                path.unlink()
    except OSError as error:
        raise ConfigError(
            f"output is {folder}, where nothing can be written ({error.strerror}: "
            f"{error.filename}). Give --output a folder that can be made or written to."
        ) from error


def write_rows(folder: Path, steps: list[Step]) -> Path:
    """One JSON object a step, in order."""
    path = folder / ROWS
    path.write_text(
        "".join(f"{json.dumps(plain(asdict(step)))}\n" for step in steps), encoding="utf-8"
    )
    return path


def draw(folder: Path, steps: list[Step], values: dict[str, Any], task: Task, threads: int) -> Path:
    """Reward by step above, time of one gradient by step below; `values` are of `summary`."""
    figure = Figure(figsize=(8, 6.6), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"GRPO from random weights, {task.groups} prompts of {task.prompt_tokens:,} tokens and "
        f"{task.groups * task.rollouts_per_group} responses a step",
        fontsize=13,
    )
    above, below = figure.subplots(2, 1, sharex=True)
    numbers = [step.step for step in steps]

    above.set_title(
        "reward: share of the response's words in the dialect of its prompt",
        loc="left",
        fontsize=10,
    )
    for group in range(task.groups):
        above.plot(
            numbers,
            [step.group_rewards[group] for step in steps],
            linestyle="none",
            marker="o",
            markersize=3.5,
            markeredgewidth=0,
            color=REWARD,
            alpha=0.35,
            label="mean of one prompt's responses" if group == 0 else None,
        )
    above.plot(numbers, values["rewards"], color=REWARD, linewidth=2, label="mean of the step")
    above.axhline(
        BLIND_REWARD,
        color=GREY,
        linestyle="--",
        linewidth=1.2,
        label="expected without reading the prompt",
    )
    above.set_ylim(0, 1.03)
    above.set_ylabel("reward (0 to 1)")
    above.legend(loc="best", fontsize=9)

    below.set_title(
        f"time of one gradient, {threads} CPU {'thread' if threads == 1 else 'threads'}: "
        f"{values['speedup']:.1f}x measured, counted bound {values['bound']:.1f}x",
        loc="left",
        fontsize=10,
    )
    for way, color in (("dense", DENSE), ("shared", SHARED)):
        below.plot(
            numbers,
            [ms / 1e3 for ms in values[f"{way}_step_ms"]],
            color=color,
            linewidth=1.5,
            marker="o",
            markersize=3,
            label=f"{way}, median {values[f'{way}_median_ms'] / 1e3:.2f} s",
        )
    below.set_ylim(0, 1.1e-3 * max(values["dense_step_ms"] + values["shared_step_ms"]))
    below.set_ylabel("seconds a gradient")
    below.set_xlabel("step")
    below.legend(loc="best", fontsize=9)
    below.locator_params(axis="x", integer=True, nbins=MOST_TICKS)
    for axes in (above, below):
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path = folder / PLOT
    figure.savefig(path, dpi=150)
    return path
