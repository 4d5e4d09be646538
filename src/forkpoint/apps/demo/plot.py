"""The plot of a run."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from forkpoint.apps.demo.loop import Step, Task
from forkpoint.apps.demo.task import BLIND_REWARD

REWARD, SHARED, DENSE, GREY = "#1b7f5c", "#1f5fbf", "#c8601a", "#767676"


def draw(path: Path, steps: list[Step], values: dict[str, Any], task: Task, threads: int) -> None:
    """Reward by step above, time of one gradient by step below; `values` are of `summary`."""
    figure = Figure(figsize=(8, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"GRPO from random weights, {task.groups} prompts of {task.prompt_tokens:,} tokens and "
        f"{task.groups * task.rollouts_per_group} responses a step",
        fontsize=13,
    )
    above, below = figure.subplots(2, 1, sharex=True)
    numbers = [step.step for step in steps]
    title: dict[str, Any] = {"loc": "left", "fontsize": 10}

    above.set_title("reward: share of the response's words in the dialect of its prompt", **title)
    for group in range(task.groups):
        label = "mean of one prompt's responses" if group == 0 else None
        rewards = [step.group_rewards[group] for step in steps]
        above.plot(numbers, rewards, "o", markersize=3, color=REWARD, alpha=0.35, label=label)
    above.plot(numbers, values["rewards"], color=REWARD, linewidth=2, label="mean of the step")
    blind = "expected without reading the prompt"
    above.axhline(BLIND_REWARD, color=GREY, linestyle="--", linewidth=1.2, label=blind)
    above.set_ylim(0, 1.03)
    above.set_ylabel("reward (0 to 1)")

    below.set_title(
        f"time of one gradient, {threads} CPU {'thread' if threads == 1 else 'threads'}: "
        f"{values['speedup']:.1f}x measured, counted bound {values['bound']:.1f}x",
        **title,
    )
    for name, color in (("dense", DENSE), ("shared", SHARED)):
        seconds = [ms / 1e3 for ms in values[f"{name}_step_ms"]]
        label = f"{name}, median {values[f'{name}_median_ms'] / 1e3:.2f} s"
        below.plot(numbers, seconds, "o-", color=color, linewidth=1.5, markersize=3, label=label)
    below.set_ylim(bottom=0)
    below.set_ylabel("seconds a gradient")
    below.set_xlabel("step")
    below.locator_params(axis="x", integer=True, nbins=12)
    for axes in (above, below):
        axes.legend(loc="best", fontsize=9)
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
