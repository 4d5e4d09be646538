"""The folder of a replay: what it was begun with, its rows, its plans, and its last checkpoint.

    manifest.json            what must stay the same, and what is good to know besides
    rows.jsonl               one row a step, as it goes
    plans.jsonl              the plans of every batch that is new, before its first row
    checkpoint.safetensors   the state after some step, and how long the files then were

Whatever moment a replay is killed at, the checkpoint is whole: it is written under another name,
synced and renamed. What the other files hold beyond it is cut off on resuming and made again. While
a replay runs, a lock on `.lock` keeps others out. Imports no torch.
"""

import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from forkpoint.errors import ConfigError
from forkpoint.plan import Plan
from forkpoint.rollouts import RolloutBatch, short
from forkpoint.traces.lock import LOCK, FolderLock

SCHEMA = 1
MANIFEST, ROWS, PLANS = "manifest.json", "rows.jsonl", "plans.jsonl"
CHECKPOINT = "checkpoint.safetensors"
GROWING = (ROWS, PLANS)
MOST_NAMED = 8


class State(Protocol):
    """What is saved and put back: `forkpoint.replay.checkpoint.Checkpoint`."""

    def write(self, path: Path, facts: Mapping[str, Any]) -> None: ...
    def read(self, path: Path) -> dict[str, Any]: ...


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

    def close(self) -> None:
        """Let others open the folder; closing again does nothing."""
        self._lock.release()

    def _open(self, fixed: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
        for left in self.path.glob(".*.tmp"):
            left.unlink()
        present = sorted(entry.name for entry in self.path.iterdir() if entry.name != LOCK)
        now = json.loads(json.dumps(fixed, default=str))
        if MANIFEST in present:
            if not self.resume:
                raise ConfigError(
                    f"{self.path} holds a replay already. Add --resume to go on with it, or give "
                    "another folder."
                )
            self._compare(now)
            return True
        if present:
            raise ConfigError(
                f"{self.path} holds no replay, but {len(present)} other files, among them "
                f"{present[0]}. Give an empty or a new folder."
            )
        manifest = {"schema": SCHEMA, "fixed": now, "about": dict(about)}
        text = json.dumps(manifest, indent=1, default=str)
        self._put(MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))
        return False

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

    def restore(self, state: State) -> list[dict[str, Any]]:
        """Put the last checkpoint back and return the rows up to it; none without a checkpoint.

        Raises ConfigError where a file is not what the checkpoint was written beside.
        """
        lengths = dict.fromkeys(GROWING, 0)
        if (self.path / CHECKPOINT).exists():
            facts = state.read(self.path / CHECKPOINT)
            for name in GROWING:
                begun = self._read(name)[: facts["bytes"][name]]
                if len(begun) != facts["bytes"][name] or zlib.crc32(begun) != facts["crc"][name]:
                    raise ConfigError(
                        f"{self.path / name} is not as the checkpoint left it: its first "
                        f"{facts['bytes'][name]} bytes have changed. Begin anew in another folder."
                    )
            lengths = facts["bytes"]
        for name in GROWING:
            with (self.path / name).open("ab") as file:
                file.truncate(lengths[name])
        self._known = {plan["fingerprint"] for plan in self._lines(PLANS)}
        return self._lines(ROWS)

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
                "plans": {name: json.loads(plan.to_json()) for name, plan in plans.items()},
            },
        )

    def save(self, state: State, step: int) -> None:
        """Make `state` the checkpoint, as of `step` steps."""
        content = {name: self._read(name) for name in GROWING}
        for name in GROWING:
            _sync(self.path / name)
        facts = {
            "step": step,
            "bytes": {name: len(data) for name, data in content.items()},
            "crc": {name: zlib.crc32(data) for name, data in content.items()},
        }
        self._put(CHECKPOINT, lambda path: state.write(path, facts))

    def _put(self, name: str, write: Any) -> None:
        """A file is there whole or not at all, also after a power cut."""
        temporary = self.path / f".{name}.tmp"
        write(temporary)
        _sync(temporary)
        temporary.replace(self.path / name)
        _sync(self.path)

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        line = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
        with (self.path / name).open("ab") as file:
            file.write(line.encode() + b"\n")

    def _read(self, name: str) -> bytes:
        path = self.path / name
        return path.read_bytes() if path.exists() else b""

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._read(name).splitlines()]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a replay's folder.

    Raises ConfigError where there is none, or one of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no replay: it has no {MANIFEST}. Give the folder that "
            "forkpoint replay --output wrote."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON ({error}). It has been changed by hand.") from None
    found = manifest.get("schema") if isinstance(manifest, dict) else None
    if found != SCHEMA:
        raise ConfigError(
            f"{path} has schema {found!r}, and this forkpoint reads {SCHEMA}. Use the forkpoint "
            "that wrote it, or replay again."
        )
    return manifest


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


def finite(value: Any) -> Any:
    """The same tree with numbers that JSON lacks (NaN, infinities) as null."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _sync(path: Path) -> None:
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
