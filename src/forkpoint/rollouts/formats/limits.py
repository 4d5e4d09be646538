"""Memory limit of reading. Imports no torch.

A reader estimates sizes before it allocates memory, and raises an error if the limit would be
exceeded. Kept rollouts stay charged.
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
"""Smallest default limit."""
TIMES_FILE = 16
"""Ratio of the default limit to the size on disk, for larger files; also the ratio of memory to
bytes while JSON is parsed."""
ROLLOUT_BYTES = 512
"""Bytes of a `Rollout` without the data of its arrays."""


def bytes_on_disk(path: Path) -> int:
    """Size on disk of a file with its file of pixels, or of the files in a folder.

    A sparse file takes fewer bytes than its length.
    """
    if path.is_dir():
        return sum(bytes_on_disk(entry) for entry in path.iterdir() if entry.is_file())
    found = path.stat()
    # Some file systems report no blocks, and neither does Windows.
    blocks = 0 if sys.platform == "win32" else found.st_blocks
    held = min(found.st_size, blocks * 512) if blocks else found.st_size
    beside = pixels_path(path)
    return held + (bytes_on_disk(beside) if beside.is_file() else 0)


class MemoryLimit:
    """Memory limit for reading one file, with the bytes that are charged.

    limit_bytes: the limit; by default LEAST_BYTES, or TIMES_FILE times the size on disk if that is
    larger.
    held_bytes: bytes that are charged at present.
    rollout_bytes, token_bytes: additional bytes that the caller needs for each kept rollout, and
    for each of its tokens.
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
        """Bytes that can still be charged."""
        return self.limit_bytes - self.held_bytes

    def check(self, count: int, what: str) -> None:
        """Raises RolloutError if fewer than `count` bytes are left. `what` needs them."""
        if count > self.left_bytes:
            held = f" and {format_bytes(self.held_bytes)} are held" if self.held_bytes else ""
            raise RolloutError(
                f"{self.path}: {what} takes {format_bytes(count)}{held}, but memory_limit is "
                f"{format_bytes(self.limit_bytes)}, {self._origin}. Raise it (memory_limit=, "
                "--memory-limit), for example to 8GB, or read fewer rollouts (limit=, --limit)."
            )

    def hold(self, count: int, what: str) -> None:
        """Charge `count` bytes before their allocation. Raises the error of `check`."""
        self.check(count, what)
        self.held_bytes += count

    def keep(self, rollout: Rollout) -> int:
        """Charge a rollout that the caller keeps, and return its size for `release`."""
        count = bytes_of(rollout)
        if self.token_bytes:  # the caller makes batches, which copy arrays
            count += count + self.rollout_bytes + self.token_bytes * len(rollout)
        self.hold(count, "one more rollout")
        return count

    def release(self, count: int) -> None:
        """Release bytes that `keep` has charged."""
        self.held_bytes -= count


def bytes_of(rollout: Rollout) -> int:
    """Bytes of a rollout in memory, with extras."""
    values = (getattr(rollout, name) for name in Rollout.__slots__)
    arrays = sum(value.nbytes for value in values if isinstance(value, np.ndarray))
    return ROLLOUT_BYTES + arrays + tree_bytes(rollout.extras)


def tree_bytes(value: Any) -> int:
    """Bytes of a tree of Python objects. Shared objects count once."""
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
