"""The limit on the memory that reading takes, and the account that readers keep of it.

A reader estimates what it is about to take and refuses what is more than is left; the rollouts that
are kept stay charged. Imports no torch.
"""

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import Rollout
from forkpoint.units import MIB, format_bytes

LEAST_BYTES = 640 * MIB
"""The default limit for any file, however small."""
TIMES_FILE = 16
"""The default limit for larger files, as a multiple of the bytes that they take on disk; and the
memory that a line of JSON takes while it is parsed, as a multiple of its bytes. A number of two
bytes is read as one of eight, and a line is held as bytes, as text and as Python objects."""
ROLLOUT_BYTES = 512
"""A `Rollout` without the numbers in its arrays."""


def bytes_on_disk(path: Path) -> int:
    """Bytes that a file takes on disk, which for a file with holes are fewer than its length; of a
    folder, the bytes of the files in it."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        with os.scandir(path) as entries:
            return sum(_allocated(e.stat()) for e in entries if e.is_file())
    return _allocated(found)


def _allocated(found: os.stat_result) -> int:
    # Some file systems count no blocks, and Windows has no such count.
    blocks = 0 if sys.platform == "win32" else found.st_blocks
    return min(found.st_size, blocks * 512) if blocks else found.st_size


class MemoryLimit:
    """The memory that reading one file may take, and an account of what it has taken.

    given: the limit in bytes that was asked for; None takes the default, which is LEAST_BYTES or
        TIMES_FILE times what the file takes on disk, whichever is larger.
    disk_bytes: what the file takes on disk.
    limit_bytes: the limit.
    held_bytes: what is charged at present.
    rollout_bytes, token_bytes: what the caller needs for each rollout that it keeps, and for each
        token of it, besides the rollout itself: a plan of a batch, for one.
    """

    def __init__(self, path: Path, given: int | None = None) -> None:
        self.path = path
        self.given = given
        self.disk_bytes: int = bytes_on_disk(path)
        self.limit_bytes: int = given or max(LEAST_BYTES, TIMES_FILE * self.disk_bytes)
        self.held_bytes: int = 0
        self.rollout_bytes: int = 0
        self.token_bytes: int = 0
        self._kept_bytes: int = 0

    def reset(self) -> None:
        """Give back all that is charged, where a file is read once more."""
        self.held_bytes = self._kept_bytes = 0

    @property
    def left_bytes(self) -> int:
        """How much more can be charged."""
        return self.limit_bytes - self.held_bytes

    def check(self, count: int, what: str) -> None:
        """Raises RolloutError, naming the limit and the option, where `count` bytes are more than
        is left; `what` is what they are for."""
        if count > self.left_bytes:
            raise self.refusal(count, what)

    def hold(self, count: int, what: str) -> None:
        """Charge `count` bytes before they are allocated. Raises as `check` does."""
        self.check(count, what)
        self.held_bytes += count

    def keep(self, rollout: Rollout) -> int:
        """Charge a rollout that the caller keeps, with what the caller needs for it, and return how
        many bytes that is. `let_go` gives them back."""
        count = bytes_of(rollout, self.left_bytes)
        if self.token_bytes:  # the caller makes batches, which copy the arrays
            count += count + self.rollout_bytes + self.token_bytes * len(rollout)
        self.hold(count, f"rollouts, of which {format_bytes(self._kept_bytes)} are kept already,")
        self._kept_bytes += count
        return count

    def let_go(self, count: int) -> None:
        """Give back what `keep` charged."""
        self.held_bytes -= count
        self._kept_bytes -= count

    def refusal(self, count: int, what: str) -> RolloutError:
        """The error for `count` bytes that are not left."""
        origin = "as given"
        if self.given is None:
            origin = f"the default for a file of {format_bytes(self.disk_bytes)}"
        s = "" if what.startswith("rollouts") else "s"
        held = f" besides the {format_bytes(self.held_bytes)} held" if self.held_bytes else ""
        return RolloutError(
            f"{self.path} needs more memory than it may take: {what} need{s} "
            f"{format_bytes(count)}{held}, and memory_limit is "
            f"{format_bytes(self.limit_bytes)}, {origin}. Where "
            "the file is meant to be so large, raise the limit (memory_limit=, --memory-limit), "
            "for example to 8GB; limit= or --limit reads fewer rollouts."
        )


def bytes_of(rollout: Rollout, most: int) -> int:
    """Bytes that a rollout takes in memory, extras included; of more than `most`, a part."""
    count = ROLLOUT_BYTES
    for name in Rollout.__slots__:
        value = getattr(rollout, name)
        if isinstance(value, np.ndarray):
            count += value.nbytes
    return count if rollout.extras is None else count + tree_bytes(rollout.extras, most)


def tree_bytes(value: Any, most: int) -> int:
    """Bytes of a tree of Python objects; what several places of it share is counted once. Of more
    than `most` bytes only a part is counted, which is more than `most` as well."""
    seen: set[int] = set()
    waiting, count = [value], 0
    while waiting and count <= most:
        item = waiting.pop()
        if isinstance(item, Mapping | list | tuple | np.ndarray):
            if id(item) in seen:
                continue
            seen.add(id(item))
        count += item.nbytes if isinstance(item, np.ndarray) else sys.getsizeof(item)
        if isinstance(item, Mapping):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)
    return count
