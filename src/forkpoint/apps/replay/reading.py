"""Reading a replay's folder, for a report or to resume. Imports no torch.

Reading returns what the schema allows, or raises ConfigError with the file, the line, the field and
its value. Files are read a line at a time.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkpoint.apps.replay.records import ReplayStep, read_step
from forkpoint.apps.replay.schema import (
    CHECKPOINT_STATE,
    MANIFEST,
    MANIFEST_FIELDS,
    MOST_LINE_BYTES,
    MOST_MANIFEST_BYTES,
    PLANNED,
    PLANS,
    ROWS,
    SCHEMA,
    STATE,
)
from forkpoint.errors import ConfigError
from forkpoint.plan import Plan
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.schema import SchemaError, parse_json

CHANGED = (
    "The file is not as forkpoint wrote it: take the folder as it was written, or replay again"
)


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """The plans of one batch of a replay."""

    fingerprint: str
    rollout_ids: tuple[str, ...]
    group_ids: tuple[str | None, ...]
    shared: Plan
    dense: Plan | None


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a replay's folder.

    Raises ConfigError where there is none, one of another version, or one with other fields than a
    replay writes.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no replay: it has no {MANIFEST}. Give the folder that "
            "forkpoint replay --output wrote."
        )
    size = path.stat().st_size
    if size > MOST_MANIFEST_BYTES:
        raise ConfigError(f"{path} has {size} bytes; at most {MOST_MANIFEST_BYTES}. {CHANGED}.")
    try:
        manifest = parse_json(path.read_bytes())
        found = manifest.get("schema") if isinstance(manifest, dict) else None
        if type(found) is not int or found != SCHEMA:
            raise ConfigError(
                f"{path} has schema {short(found)}, and this forkpoint reads {SCHEMA}. Use the "
                "forkpoint that wrote it, or replay again."
            )
        return MANIFEST_FIELDS(manifest, "")
    except SchemaError as error:
        raise ConfigError(_changed(str(path), error)) from None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint without its tensors.

    Raises ConfigError if it is missing, of another version, or has other fields.
    """
    path = checkpoint / STATE
    if not path.is_file() or path.is_symlink() or path.stat().st_size > MOST_LINE_BYTES:
        raise ConfigError(
            f"{checkpoint} is no whole checkpoint: it has no {STATE}. Begin anew in another folder."
        )
    try:
        values = json.loads(path.read_bytes())  # an optimizer's state may have NaN and infinities
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: this is not JSON ({error}). {CHANGED}.") from None
    found = values.get("schema") if isinstance(values, dict) else None
    if found != SCHEMA:
        raise ConfigError(
            f"{path} has schema {short(found)}, and this forkpoint reads {SCHEMA}. Resume with the "
            "forkpoint that wrote it, or begin anew in another folder."
        )
    try:
        state = CHECKPOINT_STATE(values, "")
    except SchemaError as error:
        raise ConfigError(f"{path}: {error}. {CHANGED}.") from None
    if not state["generators"]:
        raise ConfigError(f"{path}: generators is empty. {CHANGED}.")
    return state


def read_steps(folder: Path, manifest: dict[str, Any], end: int | None = None) -> list[ReplayStep]:
    """The rows of a replay, in order; those of the first `end` bytes of the file, or all.

    Raises ConfigError for rows that are not those of this replay, one a step from the first on.
    """
    fixed, steps = manifest["fixed"], []

    def step_of(value: Any) -> ReplayStep:
        step = read_step(value, "")
        if step.step != len(steps) + 1:
            raise SchemaError(f"step is {step.step}; here belongs step {len(steps) + 1}")
        if step.step > fixed["steps"]:
            raise SchemaError(f"step is {step.step}; the replay has {fixed['steps']} steps")
        for name in ("dense", "difference"):
            if (getattr(step, name) is not None) != fixed["baseline"]:
                there = "is missing" if fixed["baseline"] else "is there"
                raise SchemaError(f"{name} {there}; the replay's baseline is {fixed['baseline']}")
        return step

    for step in _values(folder / ROWS, step_of, end):
        steps.append(step)
    return steps


def read_plans(folder: Path, steps: Sequence[ReplayStep]) -> Iterator[PlannedBatch]:
    """The plans of every batch of a replay, compared with the steps that ran it.

    Raises ConfigError for what is no plan or not that of a step, and, at the end, for steps whose
    batch has no plan.
    """
    ran: dict[str, list[ReplayStep]] = {}
    for step in steps:
        ran.setdefault(step.fingerprint, []).append(step)
    missing, seen = set(ran), set()

    def planned_of(value: Any) -> PlannedBatch:
        planned = _planned(value)
        if planned.fingerprint in seen:
            raise SchemaError(f"fingerprint {planned.fingerprint} has been in a line before")
        seen.add(planned.fingerprint)
        for name in ("shared", "dense"):
            plan: Plan | None = getattr(planned, name)
            events = None if plan is None else plan.events()
            for step in ran.get(planned.fingerprint, ()):
                record = getattr(step, name)
                if (None if record is None else record.events) != events:
                    raise SchemaError(f"plans.{name} is not the plan that step {step.step} ran")
        return planned

    for planned in _values(folder / PLANS, planned_of):
        missing.discard(planned.fingerprint)
        yield planned
    if missing:
        step = next(step for step in steps if step.fingerprint in missing)
        raise ConfigError(
            f"{folder / PLANS} has no plan of the batch {step.fingerprint} of step {step.step} in "
            f"{ROWS}. {CHANGED}."
        )


def _planned(value: Any) -> PlannedBatch:
    found = PLANNED(value, "")
    shared: Plan = found["plans"]["shared"]
    dense: Plan | None = found["plans"].get("dense")
    for way, plan in found["plans"].items():
        if plan.shape is None:
            raise SchemaError(f"plans.{way}.shape is None; it takes the model's shape")
        if plan.fingerprint != found["fingerprint"]:
            raise SchemaError(f"plans.{way} is of another batch, {plan.fingerprint}")
        for name in ("rollout_ids", "group_ids"):
            if len(found[name]) != plan.rollouts:
                raise SchemaError(
                    f"{name} has {len(found[name])} entries, and plans.{way} {plan.rollouts} "
                    "rollouts"
                )
    if dense is not None and dense.sharing != "none":
        raise SchemaError(f"plans.dense.sharing is {dense.sharing!r}; it takes 'none'")
    return PlannedBatch(
        fingerprint=found["fingerprint"],
        rollout_ids=found["rollout_ids"],
        group_ids=found["group_ids"],
        shared=shared,
        dense=dense,
    )


def _values(path: Path, make: Callable[[Any], Any], end: int | None = None) -> Iterator[Any]:
    """The result of `make` for the JSON of each line of the first `end` bytes, or of all.

    Errors name file and line. A last line without its line feed was not finished, and is left out.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is missing. Give the folder that forkpoint replay wrote.")
    with path.open("rb") as file:
        at = number = 0
        while end is None or at < end:
            line = file.readline(MOST_LINE_BYTES + 1)
            at, number = at + len(line), number + 1
            where = f"{path}, line {number}"
            if len(line) > MOST_LINE_BYTES:
                raise ConfigError(
                    f"{where} is too long: a line has at most {MOST_LINE_BYTES} bytes. {CHANGED}."
                )
            if not line.endswith(b"\n"):
                return
            if end is not None and at > end:
                raise ConfigError(f"{where} goes beyond byte {end}, where a line ends. {CHANGED}.")
            try:
                made = make(parse_json(line))
            except SchemaError as error:
                raise ConfigError(_changed(where, error)) from None
            yield made


def _changed(where: str, error: SchemaError) -> str:
    said = str(error)
    return f"{where}: {'this is ' if said.startswith('not JSON') else ''}{said}. {CHANGED}."
