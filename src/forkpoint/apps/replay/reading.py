"""Reading a replay's folder, for a report or to resume. Imports no torch.

Whatever is in the folder, reading gives what the schema allows or raises ConfigError with the file,
the line, the field and its value. Files are read a line at a time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkpoint.apps.replay.records import ReplayStep, StepRecord, read_step
from forkpoint.apps.replay.schema import (
    MANIFEST,
    MANIFEST_FIELDS,
    MOST_LINE_BYTES,
    MOST_MANIFEST_BYTES,
    MOST_ROWS_BYTES,
    PLANNED,
    PLANS,
    ROWS,
    SCHEMA,
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


def read_steps(folder: Path, manifest: dict[str, Any], end: int | None = None) -> list[ReplayStep]:
    """The rows of a replay, in order; those of the first `end` bytes of the file, or all.

    Raises ConfigError for rows that are not those of this replay, one a step from the first on.
    """
    fixed, steps = manifest["fixed"], []

    def step_of(value: Any) -> ReplayStep:
        step = read_step(value)
        if step.step != len(steps) + 1:
            raise SchemaError(f"step is {step.step}; here belongs step {len(steps) + 1}")
        if step.step > fixed["steps"]:
            raise SchemaError(f"step is {step.step}; the replay has {fixed['steps']} steps")
        for name in ("dense", "difference"):
            if (getattr(step, name) is not None) != fixed["baseline"]:
                there = "is missing" if fixed["baseline"] else "is there"
                raise SchemaError(f"{name} {there}; the replay's baseline is {fixed['baseline']}")
        return step

    for step in _values(folder / ROWS, step_of, end, MOST_ROWS_BYTES):
        steps.append(step)
    return steps


def read_plans(
    folder: Path, steps: Sequence[ReplayStep], end: int | None = None
) -> Iterator[PlannedBatch]:
    """The plans of every batch of a replay, each held against the steps that ran it.

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
        events = {way: plan.events() for way, plan in _ways(planned)}
        for step in ran.get(planned.fingerprint, ()):
            _check_step(step, planned, events)
        return planned

    for planned in _values(folder / PLANS, planned_of, end):
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


def _ways(planned: PlannedBatch) -> Iterator[tuple[str, Plan]]:
    yield "shared", planned.shared
    if planned.dense is not None:
        yield "dense", planned.dense


def _check_step(
    step: ReplayStep, planned: PlannedBatch, events: dict[str, tuple[str, ...]]
) -> None:
    """Raises SchemaError where a plan is not the one that a step ran."""
    if (step.dense is None) != (planned.dense is None):
        raise SchemaError(f"plans.dense and dense of step {step.step} are not there both")
    for way, plan in _ways(planned):
        ran: StepRecord = getattr(step, way)
        shape = plan.shape
        assert shape is not None
        if ran.events != events[way]:
            raise SchemaError(f"{way}.events of step {step.step} are not those of plans.{way}")
        for name, found, wanted in (
            (f"{way}.sharing", ran.sharing, plan.sharing),
            (f"{way}.boundary", ran.boundary, plan.boundary),
            (f"{way}.microbatches", ran.microbatches, len(plan.microbatches)),
            (f"{way}.computed_tokens", ran.computed_tokens, plan.computed_tokens),
            (f"{way}.predicted_peak_bytes", ran.predicted_peak_bytes, plan.predicted_peak_bytes),
            (f"{way}.flops", ran.flops, plan.shared.step_flops(shape)),
            ("rollouts", step.rollouts, plan.rollouts),
            ("logical_tokens", step.logical_tokens, plan.logical_tokens),
            ("unique_tokens", step.unique_tokens, plan.unique_tokens),
            ("left_out_tokens", step.left_out_tokens, plan.left_out.tokens),
            ("dense_flops", step.dense_flops, plan.dense.step_flops(shape)),
        ):
            same = found == wanted
            if isinstance(found, float) and isinstance(wanted, float):
                same = math.isclose(found, wanted, rel_tol=1e-9)
            if not same:
                raise SchemaError(
                    f"{name} of step {step.step} is {short(found)}, and plans.{way} says "
                    f"{short(wanted)}"
                )


def _values(
    path: Path, make: Callable[[Any], Any], end: int | None, most_bytes: int | None = None
) -> Iterator[Any]:
    """Objects that `make` makes of the JSON of each line; errors name file and line.

    A last line without an end is still being written, or was when its writer ended; it is left.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is missing. Give the folder that forkpoint replay wrote.")
    with path.open("rb") as file:
        at = number = 0
        while end is None or at < end:
            line = file.readline(MOST_LINE_BYTES + 1)
            at, number = at + len(line), number + 1
            where = f"{path}, line {number}"
            if len(line) > MOST_LINE_BYTES or (most_bytes is not None and at > most_bytes):
                raise ConfigError(
                    f"{where} is too long: a line has at most {MOST_LINE_BYTES} bytes"
                    + (f", and the file {most_bytes}" if most_bytes is not None else "")
                    + f". {CHANGED}."
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
