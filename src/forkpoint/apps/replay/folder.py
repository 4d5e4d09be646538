"""The folder of a replay: what it was begun with, its rows, its plans, and its last checkpoint.

    manifest.json          what must stay the same, and further facts
    rows.jsonl             one row a step, as it goes
    plans.jsonl            the plans of every new batch, before its first row
    checkpoint-00000012/   the state after 12 steps, and how long rows and plans then were

A checkpoint is written in the folder `.saving`, flushed and renamed; then the one before it is
removed. So there is always a whole one, whenever a process is killed. A replay that resumes goes on
from the last one, and cuts off what rows and plans hold beyond it. Imports no torch.
"""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from forkpoint.apps.replay.reading import CHANGED, read_manifest, read_state, read_steps
from forkpoint.apps.replay.records import ReplayStep
from forkpoint.apps.replay.schema import (
    CHECKPOINT,
    MANIFEST,
    MANIFEST_FIELDS,
    MOST_LINE_BYTES,
    MOST_MANIFEST_BYTES,
    PLANS,
    ROWS,
    SCHEMA,
    STATE,
)
from forkpoint.errors import ConfigError
from forkpoint.plan import Plan
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.rollouts.schema import SchemaError, finite
from forkpoint.rollouts.traces.disk import LOCK, TEMPORARY, flush, lock_folder, write_file

SAVING = ".saving"
"""The folder in which a checkpoint is written. Its content is never needed later."""
GROWING = (ROWS, PLANS)
_UNFINISHED = f".{MANIFEST}{TEMPORARY}"
MOST_NAMED = 8
"""Differences that are named, of a replay that is not the one that was begun."""


class ReplayFolder:
    """Where a replay writes, and from where it is resumed. On several ranks, the first uses it.

    Args:
        path: the folder, made if it is not there.
        resume: go on where the folder's replay was; begin if none has begun. Otherwise a folder
            that holds anything is refused.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False) -> None:
        self.path: Path = Path(path)
        self.resume: bool = resume
        self._known: set[str] = set()
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
        self._refuse_links(LOCK)
        self._lock = lock_folder(self.path)
        if self._lock is None:
            raise ConfigError(
                f"another replay writes into {self.path}; a folder has one at a time. Wait until "
                "that one ends or end its process, or give another folder."
            )
        try:
            return self._open(fixed, about)
        except BaseException:
            self.close()
            raise

    def memory_budget_bytes(self) -> int | None:
        """The budget that the replay to be resumed was begun with; None if there is none."""
        if not self.resume or not (self.path / MANIFEST).is_file():
            return None
        return read_manifest(self.path)["fixed"]["runs_on"]["memory_budget_bytes"]

    def close(self) -> None:
        """Let others open the folder; closing again does nothing."""
        if self._lock is not None:
            self._lock.release()

    def _open(self, fixed: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
        values = _named_numbers({"schema": SCHEMA, "fixed": fixed, "about": about})
        text = json.dumps(values, indent=1, default=str)
        now = json.loads(text)
        if (self.path / MANIFEST).exists():
            if not self.resume:
                raise ConfigError(
                    f"{self.path} holds a replay already. Add --resume to go on with it, or give "
                    "another folder."
                )
            self._refuse_links(MANIFEST, *GROWING)
            self._compare(now["fixed"])
            return True
        others = sorted(e.name for e in self.path.iterdir() if e.name not in (LOCK, _UNFINISHED))
        if others:
            raise ConfigError(
                f"{self.path} holds no replay, but {len(others)} other files, among them "
                f"{others[0]}. Give an empty or a new folder."
            )
        try:
            MANIFEST_FIELDS(now, "")
            if len(text) > MOST_MANIFEST_BYTES:
                raise SchemaError(f"it has {len(text)} bytes, and at most {MOST_MANIFEST_BYTES}")
        except SchemaError as error:
            raise ConfigError(
                f"what the manifest would say of this replay cannot be read back: {error}. Change "
                "that, or replay without a folder."
            ) from None
        write_file(self.path / MANIFEST, text.encode())
        return False

    def _refuse_links(self, *names: str) -> None:
        """Refuse files that are elsewhere: they are cut off, appended to and replaced."""
        for name in names:
            path = self.path / name
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise ConfigError(
                    f"{path} is a link or no regular file, and the replay would write to it. "
                    "Put the file itself there, or begin anew in another folder."
                )

    def _compare(self, now: dict[str, Any]) -> None:
        before = read_manifest(self.path)["fixed"]
        changed = differences(_without_same_rate(before, now), _without_same_rate(now, before))
        if changed:
            more = f"\nand {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
            raise ConfigError(
                f"the replay in {self.path} was begun with other input:\n"
                + "\n".join(f"  {line}" for line in changed[:MOST_NAMED])
                + f"{more}\nResume with what it was begun with, or begin anew in another folder."
            )

    # Rows and plans
    # ------------------------------------------------------------

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Append a row; readers see it at once."""
        self._append(ROWS, row)

    def add_plans(self, fingerprint: str, batch: RolloutBatch, plans: Mapping[str, Plan]) -> None:
        """Append the plans of a batch, unless they are there."""
        if fingerprint in self._known:
            return
        self._known.add(fingerprint)
        self._append(
            PLANS,
            {
                "fingerprint": fingerprint,
                "rollout_ids": list(batch.rollout_ids),
                "group_ids": list(batch.group_ids),
                "trained_tokens": batch.trained_tokens,
                "plans": {name: plan.to_dict() for name, plan in plans.items()},
            },
        )

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        line = json.dumps(finite(value), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        if len(line) > MOST_LINE_BYTES:
            raise ConfigError(
                f"a line of {self.path / name} would have {len(line)} bytes, and at most "
                f"{MOST_LINE_BYTES} can be read back. Give fewer groups to a step, or replay "
                "without a folder."
            )
        with (self.path / name).open("ab") as file:
            file.write(line)

    # Checkpoints
    # ------------------------------------------------------------

    def begin_checkpoint(self, step: int) -> Path:
        """The folder in which to write the checkpoint after `step` steps, empty."""
        self._remove_unfinished()
        path = self.path / SAVING / f"{CHECKPOINT}{step:08d}"
        path.mkdir(parents=True)
        return path

    def finish_checkpoint(self, step: int, state: Mapping[str, Any]) -> None:
        """Write what belongs beside the tensors, and make the checkpoint the last one."""
        lengths: dict[str, int] = {}
        for name in GROWING:
            flush(self.path / name)
            lengths[name] = (self.path / name).stat().st_size
        text = json.dumps({"schema": SCHEMA, "step": step, "bytes": lengths, **state})
        path = self.path / SAVING / f"{CHECKPOINT}{step:08d}"
        write_file(path / STATE, text.encode())
        for file in (*path.iterdir(), path):
            flush(file)
        before = self._checkpoints(self.path)
        path.rename(self.path / path.name)
        flush(self.path)
        for old in before:
            shutil.rmtree(old)
        self._remove_unfinished()

    def last_checkpoint(self) -> tuple[Path, dict[str, Any], list[ReplayStep]] | None:
        """The last checkpoint, what is beside its tensors, and the steps up to it.

        Raises ConfigError unless the rows up to it are there.
        """
        if (self.path / "checkpoint.safetensors").exists():
            raise ConfigError(
                f"{self.path} has the checkpoint of an earlier forkpoint. Resume with that version,"
                " or begin anew in another folder."
            )
        found = self._checkpoints(self.path)
        if not found:
            return None
        path = found[-1]
        state = read_state(path)
        for name in GROWING:
            if not (self.path / name).exists() or (
                (self.path / name).stat().st_size < state["bytes"][name]
            ):
                raise ConfigError(
                    f"{self.path / name} has fewer than the {state['bytes'][name]} bytes that it "
                    f"had at {path.name}. {CHANGED}."
                )
        steps = read_steps(self.path, read_manifest(self.path), state["bytes"][ROWS])
        if path.name != f"{CHECKPOINT}{len(steps):08d}" or len(steps) != state["step"]:
            raise ConfigError(
                f"{path} is of step {state['step']}, and {ROWS} has {len(steps)} rows up to it. "
                f"{CHANGED}."
            )
        return path, state, steps

    def cut(self, state: Mapping[str, Any] | None, steps: list[ReplayStep]) -> None:
        """Go on from a checkpoint, or from the beginning: remove what is beyond it."""
        self._remove_unfinished()
        for old in self._checkpoints(self.path)[:-1]:
            shutil.rmtree(old)
        for name in GROWING:
            with (self.path / name).open("ab") as file:
                file.truncate(0 if state is None else state["bytes"][name])
        self._known = {step.fingerprint for step in steps}

    def _checkpoints(self, folder: Path) -> list[Path]:
        """The checkpoints in a folder, by step."""
        found = sorted(folder.glob(f"{CHECKPOINT}{'[0-9]' * 8}"))
        for path in found:
            if path.is_symlink() or not path.is_dir():
                raise ConfigError(
                    f"{path} is a link or no folder, and the replay would remove it. Put the "
                    "folder itself there, or begin anew in another folder."
                )
        return found

    def _remove_unfinished(self) -> None:
        """Remove the checkpoint that was being written when a process ended."""
        saving = self.path / SAVING
        if saving.is_dir() and not saving.is_symlink():
            for path in self._checkpoints(saving):
                shutil.rmtree(path)
            if not any(saving.iterdir()):
                saving.rmdir()


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


def _without_same_rate(fixed: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Without the steps of the rate, if in both they are those of the replay."""
    if any(one["rate"]["steps"] != one["steps"] for one in (fixed, other)):
        return fixed
    rate = {name: value for name, value in fixed["rate"].items() if name != "steps"}
    return {**fixed, "rate": rate}


def _named_numbers(value: Any) -> Any:
    """The same tree with numbers that JSON lacks (NaN, infinities) as text."""
    if isinstance(value, Mapping):
        return {key: _named_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_named_numbers(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
