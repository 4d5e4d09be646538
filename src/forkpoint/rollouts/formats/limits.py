"""The limit on the memory that reading takes. Imports no torch.

A reader estimates the bytes that it will take and refuses more than is left; rollouts that are kept
stay charged.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import Rollout
from forkpoint.rollouts.disk import pixels_path
from forkpoint.units import MIB, format_bytes

LEAST_BYTES = 640 * MIB
"""The default limit for any file, however small."""
TIMES_FILE = 16
"""The default limit for larger files, as a multiple of their bytes on disk; and the memory that
JSON takes while it is parsed, as a multiple of its bytes."""
ROLLOUT_BYTES = 512
"""A `Rollout` without the numbers in its arrays."""


def bytes_on_disk(path: Path) -> int:
    """Bytes that a file takes on disk, with pixels beside it; of a folder, of the files in it.

    A file with holes takes fewer than its length.
    """
    if path.is_dir():
        return sum(bytes_on_disk(entry) for entry in path.iterdir() if entry.is_file())
    found = path.stat()
    # Some file systems count no blocks, and Windows has no such count.
    blocks = 0 if sys.platform == "win32" else found.st_blocks
    held = min(found.st_size, blocks * 512) if blocks else found.st_size
    beside = pixels_path(path)
    return held + (bytes_on_disk(beside) if beside.is_file() else 0)


class MemoryLimit:
    """The memory that reading one file may take, and an account of what is held.

    limit_bytes: as given; by default LEAST_BYTES or TIMES_FILE times the file's bytes on disk,
        whichever is larger.
    held_bytes: what is charged at present.
    rollout_bytes, token_bytes: what the caller needs for each rollout that it keeps, and for each
        of its tokens, besides the rollout itself.
    """

    def __init__(self, path: Path, given: int | None = None) -> None:
        self.path = path
        self._origin = "as given" if given else "the default for this file"
        self.limit_bytes: int = given or max(LEAST_BYTES, TIMES_FILE * bytes_on_disk(path))
        self.held_bytes: int = 0
        self.rollout_bytes: int = 0
        self.token_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """How much more can be charged."""
        return self.limit_bytes - self.held_bytes

    def check(self, count: int, what: str) -> None:
        """Raises RolloutError if `count` bytes, which `what` takes, are more than is left."""
        if count > self.left_bytes:
            held = f" and {format_bytes(self.held_bytes)} are held" if self.held_bytes else ""
            raise RolloutError(
                f"{self.path}: {what} takes {format_bytes(count)}{held}, but memory_limit is "
                f"{format_bytes(self.limit_bytes)}, {self._origin}. Raise it (memory_limit=, "
                "--memory-limit), for example to 8GB, or read fewer rollouts (limit=, --limit)."
            )

    def hold(self, count: int, what: str) -> None:
        """Charge `count` bytes before they are allocated. Raises as `check` does."""
        self.check(count, what)
        self.held_bytes += count

    def keep(self, rollout: Rollout) -> int:
        """Charge a rollout that the caller keeps, and return its bytes, for `release`."""
        count = bytes_of(rollout)
        if self.token_bytes:  # the caller makes batches, which copy the arrays
            count += count + self.rollout_bytes + self.token_bytes * len(rollout)
        self.hold(count, "one more rollout")
        return count

    def release(self, count: int) -> None:
        """Give back what `keep` charged."""
        self.held_bytes -= count


def bytes_of(rollout: Rollout) -> int:
    """Bytes that a rollout takes in memory, extras included."""
    values = (getattr(rollout, name) for name in Rollout.__slots__)
    arrays = sum(value.nbytes for value in values if isinstance(value, np.ndarray))
    return ROLLOUT_BYTES + arrays + tree_bytes(rollout.extras)


def tree_bytes(value: Any) -> int:
    """Bytes of a tree of Python objects; what several places of it share is counted once."""
    seen: set[int] = set()
    waiting, count = [value], 0
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping | list | tuple | np.ndarray):
            if id(item) in seen:
                continue
            seen.add(id(item))
        count += item.nbytes if isinstance(item, np.ndarray) else sys.getsizeof(item)
        if isinstance(item, Mapping):
            waiting.extend((*item.keys(), *item.values()))
        elif isinstance(item, list | tuple):
            waiting.extend(item)
    return count
