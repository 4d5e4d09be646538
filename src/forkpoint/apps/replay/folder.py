"""The folder of a replay: its files, written and read back. Imports no torch.

    manifest.json          what must stay the same (`fixed`), and further facts (`about`)
    calibration.json       prices of plans, if the device was measured
    rows.jsonl             one row a step, as it goes
    checkpoint-00000012/   the state after 12 steps

A checkpoint is written in the folder `.saving`, flushed and renamed; then the one before it is
removed. So there is always a whole one, whenever a process is killed. A replay that resumes goes on
from the last one, and removes later rows.

Reading returns what the schema allows, or raises ConfigError with the file, the field and its
value. Nothing in the folder is executed.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from forkpoint.apps.replay.records import STEPS, ReplayStep, read_step
from forkpoint.errors import ConfigError
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.disk import flush, lock_folder, write_file
from forkpoint.rollouts.schema import (
    Check,
    SchemaError,
    array,
    finite,
    flag,
    mapping,
    one_of,
    or_null,
    parse_json,
    record,
    text,
    tree,
    whole,
)

SCHEMA = 3
MANIFEST, ROWS, STATE = "manifest.json", "rows.jsonl", "state.json"
CALIBRATION = "calibration.json"
CHECKPOINT = "checkpoint-"
"""How the name of a checkpoint's folder begins; its step follows."""
SAVING = ".saving"
"""The folder in which a checkpoint is written."""
MOST_BYTES = 1 << 26
"""Of the manifest, of one row and of a checkpoint's state."""
MOST_NAMED = 8
"""Differences that are named, of a replay that is not the one that was begun."""
CHANGED = (
    "The file is not as forkpoint wrote it: take the folder as it was written, or replay again."
)

_FIXED = record(
    {
        "steps": STEPS,
        "baseline": flag,
        "loss": text,
        "model": record({"kind": text, "config": or_null(mapping(tree))}, others=tree),
        "runs_on": record({"memory_budget_bytes": or_null(whole(1))}, others=tree),
    },
    others=tree,
)
_OF_ABOUT = {"file": text, "options": mapping(tree), "environment": mapping(tree)}
_ABOUT = record(_OF_ABOUT, optional=_OF_ABOUT, others=tree)
_MANIFEST = record({"schema": one_of(SCHEMA), "fixed": _FIXED, "about": _ABOUT})


def _scalar(value: Any, field: str) -> Any:
    if isinstance(value, list | dict):
        raise SchemaError(f"{field} is {short(value)}; it takes a number, text, a flag or null")
    return value


_STATE = record(
    {
        "schema": one_of(SCHEMA),
        "step": STEPS,
        "files": mapping(text),
        "plain": mapping(_scalar),
        "on_cpu": array(text),
        "generators": mapping(text),
    }
)


# Reading
# ------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a replay's folder.

    Raises ConfigError where there is none, one of another version, or one that no replay writes.
    """
    if not (folder / MANIFEST).is_file():
        raise ConfigError(
            f"{folder} holds no replay: it has no {MANIFEST}. Give the folder that "
            "forkpoint replay --output wrote."
        )
    return _read(folder / MANIFEST, _MANIFEST)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Values of a checkpoint beside its tensors. Raises ConfigError as `read_manifest`."""
    if not (checkpoint / STATE).is_file():
        raise ConfigError(
            f"{checkpoint} is no whole checkpoint: it has no {STATE}. Begin anew in another folder."
        )
    return _read(checkpoint / STATE, _STATE, allow_nan=True)  # as an optimizer's state may hold


def _read(path: Path, check: Check, *, allow_nan: bool = False) -> dict[str, Any]:
    if path.stat().st_size > MOST_BYTES:
        raise ConfigError(f"{path} is larger than {MOST_BYTES} bytes. {CHANGED}")
    try:
        values = parse_json(path.read_bytes(), allow_nan=allow_nan)
        found = values.get("schema") if isinstance(values, dict) else None
        if type(found) is not int or found != SCHEMA:
            raise ConfigError(
                f"{path} has schema {short(found)}, and this forkpoint reads {SCHEMA}. Use the "
                "forkpoint that wrote it, or replay again."
            )
        return check(values, "")
    except SchemaError as error:
        raise _changed(str(path), error) from None


def read_steps(
    folder: Path, manifest: Mapping[str, Any], most: int | None = None
) -> list[ReplayStep]:
    """The rows of a replay, in order; the first `most`, or all. One without a line feed is left
    out, since it is still being written.

    Raises ConfigError for rows that are not those of this replay, one a step from the first on.
    """
    path, steps = folder / ROWS, []
    if not path.is_file():
        raise ConfigError(f"{path} is missing. Give the folder that forkpoint replay wrote.")
    with path.open("rb") as file:
        while len(steps) != most:
            line = file.readline(MOST_BYTES)
            if not line.endswith(b"\n"):
                if len(line) == MOST_BYTES:
                    raise ConfigError(
                        f"{path} has a row of more than {MOST_BYTES} bytes. {CHANGED}"
                    )
                break
            try:
                step = read_step(parse_json(line), "")
                _check_step(step, len(steps) + 1, manifest["fixed"])
            except SchemaError as error:
                raise _changed(f"{path}, line {len(steps) + 1}", error) from None
            steps.append(step)
    return steps


def _check_step(step: ReplayStep, number: int, fixed: Mapping[str, Any]) -> None:
    if step.step != number or number > fixed["steps"]:
        raise SchemaError(f"step is {step.step}; here belongs step {number} of {fixed['steps']}")
    if {step.dense is not None, step.difference is not None} != {fixed["baseline"]}:
        raise SchemaError(
            f"dense or difference does not fit the replay, whose baseline is {fixed['baseline']}"
        )


def _changed(where: str, error: SchemaError) -> ConfigError:
    said = str(error)
    return ConfigError(f"{where}: {'this is ' if said.startswith('not ') else ''}{said}. {CHANGED}")


# Writing
# ------------------------------------------------------------


class ReplayFolder:
    """Where a replay writes, and from where it is resumed.

    Args:
        path: the folder, made if it is not there.
        resume: go on where the folder's replay was; begin if none has begun. Otherwise a folder
            that holds anything is refused.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False) -> None:
        self.path: Path = Path(path)
        self.resume: bool = resume
        self._lock: FileLock | None = None

    def open(self, fixed: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
        """Begin, or check that what is to be resumed is the same replay; True if one had begun.

        Until `close`, or the end of the process, no other replay can open the folder.

        Args:
            fixed: what decides every result; on resuming, all of it must be as it was.
            about: further facts, kept from the beginning.

        Raises ConfigError for a folder in use, and for a replay that differs; it names in what.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; a replay is a folder. Give another path.")
        self.path.mkdir(parents=True, exist_ok=True)
        for path in self.path.rglob("*"):
            if path.is_symlink():
                raise ConfigError(
                    f"{path} is a link, and a replay would write to where it leads. Put the file "
                    "itself there, or begin anew in another folder."
                )
        self._lock = lock_folder(self.path)
        if self._lock is None:
            raise ConfigError(
                f"another replay writes into {self.path}; a folder has one at a time. Wait until "
                "that one ends or end its process, or give another folder."
            )
        values = finite({"schema": SCHEMA, "fixed": fixed, "about": about})
        content = json.dumps(values, indent=1, default=str)
        try:
            if (self.path / MANIFEST).exists():
                self._check_same(json.loads(content)["fixed"])
                return True
            others = sorted(e.name for e in self.path.iterdir() if not e.name.startswith("."))
            if others:
                raise ConfigError(
                    f"{self.path} holds no replay, but {len(others)} other files, among them "
                    f"{others[0]}. Give an empty or a new folder."
                )
            write_file(self.path / MANIFEST, content.encode())
            return False
        except BaseException:
            self.close()
            raise

    def _check_same(self, fixed: Mapping[str, Any]) -> None:
        if not self.resume:
            raise ConfigError(
                f"{self.path} holds a replay already. Add --resume to go on with it, or give "
                "another folder."
            )
        changed = differences(read_manifest(self.path)["fixed"], fixed)
        if changed:
            more = f"\nand {len(changed) - MOST_NAMED} more" * (len(changed) > MOST_NAMED)
            raise ConfigError(
                f"the replay in {self.path} was begun with other input:\n"
                + "\n".join(f"  {line}" for line in changed[:MOST_NAMED])
                + f"{more}\nResume with what it was begun with, or begin anew in another folder."
            )

    def close(self) -> None:
        """Let others open the folder; closing again does nothing."""
        if self._lock is not None:
            self._lock.release()

    def memory_budget_bytes(self) -> int | None:
        """The budget that the replay to be resumed was begun with; None if there is none."""
        if not self.resume or not (self.path / MANIFEST).is_file():
            return None
        return read_manifest(self.path)["fixed"]["runs_on"]["memory_budget_bytes"]

    def calibration(self) -> Calibration | None:
        """The prices that the replay to be resumed was begun with; None if there are none."""
        path = self.path / CALIBRATION
        return Calibration.load(path) if self.resume and path.is_file() else None

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Append a row; readers see it at once."""
        line = json.dumps(finite(row), allow_nan=False, separators=(",", ":"))
        with (self.path / ROWS).open("ab") as file:
            file.write(line.encode() + b"\n")

    def begin_checkpoint(self) -> Path:
        """An empty folder in which to write a checkpoint."""
        shutil.rmtree(self.path / SAVING, ignore_errors=True)
        (self.path / SAVING).mkdir()
        return self.path / SAVING

    def finish_checkpoint(self, step: int, state: Mapping[str, Any]) -> None:
        """Write what belongs beside the tensors, and make the checkpoint the last one."""
        saving, before = self.path / SAVING, self._checkpoints()
        write_file(saving / STATE, json.dumps({"schema": SCHEMA, "step": step, **state}).encode())
        for path in (self.path / ROWS, *saving.iterdir(), saving):
            flush(path)
        saving.rename(self.path / f"{CHECKPOINT}{step:08d}")
        flush(self.path)
        for old in before:
            shutil.rmtree(old)

    def last_checkpoint(self) -> tuple[Path, dict[str, Any], list[ReplayStep]] | None:
        """The last checkpoint, what is beside its tensors, and the steps up to it.

        Raises ConfigError unless the rows up to it are there.
        """
        found = self._checkpoints()
        if not found:
            return None
        path, state = found[-1], read_state(found[-1])
        steps = read_steps(self.path, read_manifest(self.path), state["step"])
        if path.name != f"{CHECKPOINT}{len(steps):08d}" or len(steps) != state["step"]:
            raise ConfigError(
                f"{path} is of step {state['step']}, and {ROWS} has {len(steps)} rows up to it. "
                f"{CHANGED}"
            )
        return path, state, steps

    def cut(self, count: int) -> None:
        """Continue after this number of steps: remove later rows and files of a killed process."""
        shutil.rmtree(self.path / SAVING, ignore_errors=True)
        for old in self._checkpoints()[:-1]:
            shutil.rmtree(old)
        with (self.path / ROWS).open("a+b") as file:
            file.seek(0)
            file.truncate(sum(len(file.readline()) for _ in range(count)))

    def _checkpoints(self) -> list[Path]:
        """The checkpoints, by step."""
        return sorted(self.path.glob(f"{CHECKPOINT}{'[0-9]' * 8}"))


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Every value that differs between two trees of JSON, by its path and both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            line
            for key in {**before, **now}
            for line in differences(
                before.get(key, "nothing"), now.get(key, "nothing"), f"{name}.{key}".lstrip(".")
            )
        ]
    if before == now:
        return []
    return [f"{name} was {short(before)} and is now {short(now)}"]
