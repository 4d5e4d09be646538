"""The folder of a replay: what it was begun with, its rows, its plans, and its last checkpoint.

    manifest.json            what must stay the same, and what is good to know besides
    rows.jsonl               one row a step, as it goes
    plans.jsonl              the plans of every batch that is new, before its first row
    checkpoint.safetensors   the state after some step, and how long the files then were

Whatever moment a replay is killed at, the checkpoint is whole: it is written in the folder
`.saving`, synced and renamed. What a killed replay left in there is removed when the folder is
opened again. What the other files hold beyond the checkpoint is cut off on resuming and made again.
While a replay runs, a lock on `.lock` keeps others out. Imports no torch.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from forkpoint.apps.replay.reading import CHANGED, read_manifest, read_plans, read_steps
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
)
from forkpoint.errors import ConfigError
from forkpoint.plan import Plan
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.rollouts.schema import SchemaError, finite
from forkpoint.rollouts.traces.lock import LOCK, FolderLock

SAVING = ".saving"
"""A folder in which files are written before they are renamed. What is in it is never needed."""
GROWING = (ROWS, PLANS)
CHUNK_BYTES = 1 << 20
MOST_NAMED = 8


class State(Protocol):
    """State that is saved and put back: `forkpoint.apps.replay.checkpoint.Checkpoint`."""

    def write(self, path: Path, facts: Mapping[str, Any]) -> None: ...
    def load(self, path: Path) -> dict[str, Any]: ...
    def put_back(self) -> None: ...


class ReplayFolder:
    """Where a replay writes, and from where it is resumed.

    Args:
        path: the folder, made if it is not there.
        resume: go on where the folder's replay was; where none has begun, begin. Otherwise a folder
            that holds anything is refused.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False) -> None:
        self.path: Path = Path(path)
        self.resume: bool = resume
        self._known: set[str] = set()
        self._lock = FolderLock(self.path)

    def open(self, fixed: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
        """Begin, or see that what is to be resumed is the same replay; True if one had begun.

        Args:
            fixed: what decides every result; on resuming, all of it must be as it was.
            about: what is good to know besides, kept from the beginning.

        Until `close`, or the end of the process, no other replay can open the folder.

        Raises ConfigError for a folder in use, and for a replay that differs, naming in what.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; a replay is a folder. Give another path.")
        self.path.mkdir(parents=True, exist_ok=True)
        self._refuse_links(LOCK)
        holder = self._lock.take()
        if holder is not None:
            raise ConfigError(
                f"{self.path} is being written by the replay of {holder}; a folder has one at a "
                "time. Wait until that one ends or end its process, or give another folder."
            )
        try:
            return self._open(fixed, about)
        except BaseException:
            self.close()
            raise

    def memory_budget_bytes(self) -> int | None:
        """The budget that the replay to be resumed was begun with; None where there is none."""
        if not self.resume or not (self.path / MANIFEST).is_file():
            return None
        return read_manifest(self.path)["fixed"]["runs_on"]["memory_budget_bytes"]

    def close(self) -> None:
        """Let others open the folder; closing again does nothing."""
        self._lock.release()

    def _open(self, fixed: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
        self._remove_leftovers()
        present = sorted(entry.name for entry in self.path.iterdir() if entry.name != LOCK)
        text = json.dumps(
            _named_numbers({"schema": SCHEMA, "fixed": fixed, "about": about}),
            indent=1,
            default=str,
        )
        now = json.loads(text)
        if MANIFEST in present:
            if not self.resume:
                raise ConfigError(
                    f"{self.path} holds a replay already. Add --resume to go on with it, or give "
                    "another folder."
                )
            self._refuse_links(MANIFEST, ROWS, PLANS, CHECKPOINT)
            self._compare(now["fixed"])
            return True
        if present:
            raise ConfigError(
                f"{self.path} holds no replay, but {len(present)} other files, among them "
                f"{present[0]}. Give an empty or a new folder."
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
        self._put(MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))
        return False

    def _remove_leftovers(self) -> None:
        """Remove what a process that was killed had begun to write; nothing else is touched."""
        saving = self.path / SAVING
        if saving.is_dir() and not saving.is_symlink():
            left = list(saving.iterdir())
            if all(e.name in (MANIFEST, CHECKPOINT) or _of_safetensors(e) for e in left):
                for entry in left:
                    entry.unlink()
                saving.rmdir()
        if (self.path / MANIFEST).exists():  # then these are of an earlier version of forkpoint
            for entry in self.path.glob(".*"):
                if entry.name == f".{CHECKPOINT}.tmp" or _of_safetensors(entry):
                    entry.unlink()

    def _refuse_links(self, *names: str) -> None:
        """Refuse files that lie elsewhere: they are cut off, appended to and replaced."""
        for name in names:
            path = self.path / name
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise ConfigError(
                    f"{path} is a link or no regular file, and the replay would write to it. "
                    "Put the file itself there, or begin anew in another folder."
                )

    def _compare(self, now: dict[str, Any]) -> None:
        before = read_manifest(self.path)["fixed"]
        changed = differences(_said_once(before, now), _said_once(now, before))
        if changed:
            more = f"\nand {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
            raise ConfigError(
                f"the replay in {self.path} was begun with other input:\n"
                + "\n".join(f"  {line}" for line in changed[:MOST_NAMED])
                + f"{more}\nResume with what it was begun with, or begin anew in another folder."
            )

    def restore(self, state: State) -> list[ReplayStep]:
        """Put the last checkpoint back and return the steps up to it; none without a checkpoint.

        Nothing is put back and nothing cut off unless all of it is as it was written. Raises
        ConfigError otherwise.
        """
        lengths: dict[str, int] = {}
        steps: list[ReplayStep] = []
        path = self.path / CHECKPOINT
        if path.exists():
            facts = state.load(path)
            lengths = facts["bytes"]
            steps = self.checked_steps(path, facts)
            state.put_back()
        self.cut(lengths)
        return steps

    def checked_steps(self, path: Path, facts: Mapping[str, Any]) -> list[ReplayStep]:
        """The steps up to a checkpoint, whose facts say how long the other files then were.

        Raises ConfigError unless these are as they were.
        """
        lengths = facts["bytes"]
        for name in GROWING:
            if self._crc(name, lengths[name]) != facts["crc"][name]:
                raise ConfigError(
                    f"{self.path / name} is not as the checkpoint left it: its first "
                    f"{lengths[name]} bytes have changed. Begin anew in another folder."
                )
        steps = read_steps(self.path, read_manifest(self.path), lengths[ROWS])
        if len(steps) != facts["step"]:
            raise ConfigError(
                f"{path} is of step {facts['step']}, and {ROWS} has {len(steps)} rows up to "
                f"it. {CHANGED}."
            )
        plans = read_plans(self.path, steps, lengths[PLANS])
        self._known = {planned.fingerprint for planned in plans}
        return steps

    def cut(self, lengths: Mapping[str, int]) -> None:
        """Cut off what the files that grow hold beyond a checkpoint; all of it without one."""
        for name in GROWING:
            with (self.path / name).open("ab") as file:
                file.truncate(lengths.get(name, 0))

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Append a row; whoever reads along sees it at once."""
        self._append(ROWS, row)

    def add_plans(self, fingerprint: str, batch: RolloutBatch, plans: Mapping[str, Plan]) -> None:
        """Append what was planned for a batch, unless that batch has been there."""
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

    def save(self, state: State, step: int) -> None:
        """Make `state` the checkpoint, as of `step` steps."""
        facts = self.growing_facts(step)
        self._put(CHECKPOINT, lambda path: state.write(path, facts))

    def growing_facts(self, step: int) -> dict[str, Any]:
        """How long the files are that grow, and their checksums, once they are on disk."""
        lengths: dict[str, int] = {}
        for name in GROWING:
            sync(self.path / name)
            lengths[name] = (self.path / name).stat().st_size
        return {
            "step": step,
            "bytes": lengths,
            "crc": {name: self._crc(name, length) for name, length in lengths.items()},
        }

    def _put(self, name: str, write: Callable[[Path], object]) -> None:
        """A file is there whole or not at all, also after a power cut.

        It is written in a folder of its own, since safetensors writes files under names of its
        own, which a process that is killed leaves behind.
        """
        saving = self.path / SAVING
        saving.mkdir(exist_ok=True)
        temporary = saving / name
        try:
            write(temporary)
            sync(temporary)
            temporary.replace(self.path / name)
        finally:
            temporary.unlink(missing_ok=True)
            with suppress(OSError):  # of what a library left in it; the next to open removes it
                saving.rmdir()
        sync(self.path)

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

    def _crc(self, name: str, length: int) -> int | None:
        """The checksum of the first `length` bytes of a file; None where it has fewer."""
        path, crc = self.path / name, 0
        if not path.is_file() or path.stat().st_size < length:
            return None
        with path.open("rb") as file:
            while length and (chunk := file.read(min(CHUNK_BYTES, length))):
                crc = zlib.crc32(chunk, crc)
                length -= len(chunk)
        return crc


def _of_safetensors(path: Path) -> bool:
    """Whether a file has a name under which safetensors begins to write."""
    return path.is_file() and re.fullmatch(r"\.tmp[A-Za-z0-9]{6}", path.name) is not None


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


def _said_once(fixed: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The same without the rate's steps where, in both, they are those of the replay."""
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


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    if not path.exists():
        return
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
