"""The folder of a replay on several ranks.

Manifest, rows and plans are those of any replay, and the first rank writes them. A checkpoint is a
folder of its own, `checkpoint-00000012` after 12 steps, in which each rank writes its shards. It is
made in `.saving` and renamed when all of it is on disk, and the one before it is removed then. So
whatever process is killed, and whenever, the last one that has its name is whole.
"""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forkpoint.apps.replay.folder import SAVING, ReplayFolder, sync
from forkpoint.apps.replay.records import ReplayStep
from forkpoint.apps.replay.schema import CHECKPOINT, SHARDS, SHARDS_FACTS
from forkpoint.apps.replay.sharded_checkpoint import (
    ShardedCheckpoint,
    facts_text,
    read_sharded_facts,
)
from forkpoint.apps.replay.team import Team
from forkpoint.errors import ConfigError
from forkpoint.plan import Plan
from forkpoint.rollouts.batch import RolloutBatch


class RankFolder:
    """A replay's folder, on every rank. Methods are collective, but for `close` and those that
    add."""

    def __init__(self, folder: ReplayFolder, team: Team) -> None:
        self.folder = folder
        self.team = team
        self.path: Path = folder.path
        self.lengths: Mapping[str, int] = {}
        """On the first rank: how long the files that grow are to be."""

    def open(self, fixed: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
        """As `ReplayFolder.open`, with what the first rank gives."""

        def work() -> bool:
            _remove_unfinished(self.path)
            begun = self.folder.open(fixed, about)
            if (self.path / CHECKPOINT).exists():
                raise ConfigError(
                    f"{self.path} has the checkpoint of one process, and this replay runs on "
                    "several ranks. Resume without torchrun, or begin anew in another folder."
                )
            return begun

        return self.team.first(work)

    def memory_budget_bytes(self) -> int | None:
        """As `ReplayFolder.memory_budget_bytes`."""
        return self.team.first(self.folder.memory_budget_bytes)

    def close(self) -> None:
        self.folder.close()

    def restore(self, state: ShardedCheckpoint) -> list[ReplayStep]:
        """Put the last checkpoint back and return the steps up to it; none without a checkpoint."""
        name, steps = self.team.first(self._last)
        if name is not None:
            state.load(self.path / name)
            state.put_back()
        self.team.first(self._cut)
        return steps

    def _last(self) -> tuple[str | None, list[ReplayStep]]:
        saved = checkpoints(self.path)
        if not saved:
            return None, []
        path = saved[-1]
        facts = read_sharded_facts(path)
        if path.name != f"{SHARDS}{facts['step']:08d}":
            raise ConfigError(f"{path} is of step {facts['step']}. Begin anew in another folder.")
        self.lengths = facts["bytes"]
        return path.name, self.folder.checked_steps(path, facts)

    def _cut(self) -> None:
        self.folder.cut(self.lengths)

    def add_row(self, row: Mapping[str, Any]) -> None:
        if self.team.index == 0:
            self.folder.add_row(row)

    def add_plans(self, fingerprint: str, batch: RolloutBatch, plans: Mapping[str, Plan]) -> None:
        if self.team.index == 0:
            self.folder.add_plans(fingerprint, batch, plans)

    def save(self, state: ShardedCheckpoint, step: int) -> None:
        """Make `state` the checkpoint, as of `step` steps."""
        name = f"{SHARDS}{step:08d}"
        making, made = self.path / SAVING / name, self.path / name

        def begin() -> dict[str, Any]:
            _remove_unfinished(self.path)
            making.mkdir(parents=True)
            return self.folder.growing_facts(step)

        growing = self.team.first(begin)
        facts = self.team.each(lambda: state.write(making))

        def end() -> None:
            path = making / SHARDS_FACTS
            path.write_text(facts_text(growing | facts), encoding="utf-8")
            for file in making.iterdir():
                sync(file)
            sync(making)
            before = checkpoints(self.path)
            making.rename(made)
            sync(self.path)
            for old in before:
                _remove(old)
            making.parent.rmdir()

        self.team.first(end)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of several ranks in a folder, by step. Others than folders are refused."""
    found = sorted(p for p in folder.glob(f"{SHARDS}*") if re.fullmatch(r"\d{8}", _step(p)))
    for path in found:
        if path.is_symlink() or not path.is_dir():
            raise ConfigError(
                f"{path} is a link or no folder, and the replay would remove it. Put the folder "
                "itself there, or begin anew in another folder."
            )
    return found


def _step(path: Path) -> str:
    return path.name.removeprefix(SHARDS)


def _remove_unfinished(folder: Path) -> None:
    """Remove the checkpoint that ranks had begun to write; nothing else is touched."""
    saving = folder / SAVING
    if not saving.is_dir() or saving.is_symlink():
        return
    for path in checkpoints(saving):
        _remove(path)
    if not any(saving.iterdir()):
        saving.rmdir()


def _remove(path: Path) -> None:
    """Remove a checkpoint, beginning with what makes it one."""
    (path / SHARDS_FACTS).unlink(missing_ok=True)
    if os.path.lexists(path):
        shutil.rmtree(path)
