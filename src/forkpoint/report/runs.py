"""Reading a replay's folder for a report. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkpoint.errors import ConfigError, PlanError
from forkpoint.plan import Plan
from forkpoint.replay.folder import PLANS, ROWS, read_manifest
from forkpoint.replay.records import ReplayStep


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """What was planned for one batch of a replay."""

    rollout_ids: tuple[str, ...]
    group_ids: tuple[str | None, ...]
    shared: Plan
    dense: Plan | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A replay as its folder holds it; it may still be going on."""

    path: Path
    manifest: dict[str, Any]
    steps: tuple[ReplayStep, ...]
    planned: dict[str, PlannedBatch]
    """By the batch's fingerprint, in order of first appearance."""

    @property
    def steps_asked(self) -> int:
        return int(self.manifest["fixed"]["steps"])


def read_run(folder: Path) -> Run:
    """The replay in a folder, as far as it has come.

    Raises ConfigError where there is none, where it has no whole row yet, and for rows and plans
    that are not as forkpoint writes them, naming file and line.
    """
    manifest = read_manifest(folder)
    steps, planned = [], {}
    for where, row in _lines(folder / ROWS):
        try:
            steps.append(ReplayStep.from_dict(row))
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{where} is no row of this forkpoint's replays ({error}). Replay again."
            ) from None
    for where, entry in _lines(folder / PLANS):
        try:
            plans = entry["plans"]
            planned[entry["fingerprint"]] = PlannedBatch(
                rollout_ids=tuple(entry["rollout_ids"]),
                group_ids=tuple(entry["group_ids"]),
                shared=Plan.from_json(json.dumps(plans["shared"])),
                dense=Plan.from_json(json.dumps(plans["dense"])) if "dense" in plans else None,
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{where} is no plan of this forkpoint's replays ({error}). Replay again."
            ) from None
        except PlanError as error:
            raise ConfigError(f"{where}: {error} Replay again.") from None
    if not steps:
        raise ConfigError(f"{folder} has no step yet. Wait for the replay's first row.")
    return Run(path=folder, manifest=manifest, steps=tuple(steps), planned=planned)


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Where each line is, and its object. A last line without an end is still being written."""
    if not path.is_file():
        raise ConfigError(f"{path} is missing. Give the folder that forkpoint replay wrote.")
    *lines, _ = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} is not JSON ({error}). Replay again.") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is no JSON object. Replay again.")
        found.append((where, value))
    return found
