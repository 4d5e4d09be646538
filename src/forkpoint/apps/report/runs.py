"""A replay as a report shows it. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkpoint.apps.replay.reading import PlannedBatch, read_manifest, read_plans, read_steps
from forkpoint.apps.replay.records import ReplayStep
from forkpoint.errors import ConfigError

MOST_BATCHES = 12
"""Whose forests and timelines are drawn; of the others, how many they are is said."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A replay as its folder holds it; it may still be going on."""

    path: Path
    manifest: dict[str, Any]
    steps: tuple[ReplayStep, ...]
    planned: tuple[PlannedBatch, ...]
    """Of the first batches that ran, in order of first appearance."""
    batches: int
    """How many different batches have plans."""

    @property
    def steps_asked(self) -> int:
        return self.manifest["fixed"]["steps"]


def read_run(folder: Path, *, most_batches: int = MOST_BATCHES) -> Run:
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
        if len(planned) < most_batches:
            planned.append(batch)
    return Run(
        path=folder, manifest=manifest, steps=tuple(steps), planned=tuple(planned), batches=batches
    )
