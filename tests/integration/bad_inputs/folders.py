"""Folders of replays that were changed after they were written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bad_inputs.kind import Kind
from bad_inputs.traces import replayed
from forkpoint.errors import ConfigError

REPORT = ("report", "out")


def changed_kind(
    name: str,
    change: Callable[[], object],
    *,
    message: str,
    argv: tuple[str, ...] = REPORT,
) -> Kind:
    def prepare(patch: pytest.MonkeyPatch) -> None:
        replayed(patch)
        change()

    return Kind(
        name=name,
        error=ConfigError,
        message=message,
        argv=argv,
        prepare=prepare,
    )


def lines(name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the first line of a file of the folder."""
    path = Path("out", name)
    first, *others = path.read_text().splitlines()
    value = json.loads(first)
    change(value)
    path.write_text("\n".join([json.dumps(value), *others, ""]))


def lines_of_manifest(change: Callable[[dict[str, Any]], object]) -> None:
    path = Path("out/manifest.json")
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def linked() -> None:
    Path("out/rows.jsonl").rename("rows.jsonl")
    Path("out/rows.jsonl").symlink_to(Path("rows.jsonl").resolve())


FOLDERS = (
    changed_kind(
        "A row with a field that is not known",
        lambda: lines("rows.jsonl", lambda row: row.update(energy_j=4)),
        message="out/rows.jsonl, line 1: energy_j is no field of this schema, which has step,",
    ),
    changed_kind(
        "A line of a replay that is not JSON",
        lambda: Path("out/rows.jsonl").write_text("{'step': 1}\n"),
        message="out/rows.jsonl, line 1: this is not JSON (Expecting property name enclosed in",
    ),
    changed_kind(
        "A manifest with another value",
        lambda: lines_of_manifest(lambda values: values["fixed"].update(steps=None)),
        message="out/manifest.json: fixed.steps is None; it takes a whole number from 1 to",
    ),
)
