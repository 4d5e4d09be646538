"""Memory limit of reading. Imports no torch.

A reader estimates sizes before it allocates memory, and raises an error if the limit would be
exceeded. Kept rollouts stay charged.

By default, a small file cannot expand into a large piece, such as a line, and all that is kept has
a part of the machine's memory: compressed rollouts can take over 100 times the size of their file.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from forkpoint.errors import RolloutError
from forkpoint.host_memory import host_memory_bytes
from forkpoint.rollouts.batch import Rollout
from forkpoint.rollouts.disk import pixels_path
from forkpoint.units import MIB, format_bytes

LEAST_BYTES = 640 * MIB
"""Smallest default limit on a piece."""
TIMES_FILE = 16
"""Ratio of the default limit on a piece to the size on disk, for larger files; also the ratio of
memory to bytes while JSON is parsed."""
KEPT_SHARE = 0.5
"""Part of the machine's memory that is the default limit on all that is kept."""
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

    piece_bytes: the limit on one piece, such as a line, row group, array or batch; by default
    LEAST_BYTES, or TIMES_FILE times the size on disk if that is larger.
    limit_bytes: the limit on a piece with all that is held; by default KEPT_SHARE of the memory of
    the machine or its container, but at least piece_bytes.
    held_bytes: bytes that are charged at present.
    rollout_bytes, token_bytes: additional bytes that the caller needs for each kept rollout, and
    for each of its tokens.
    """

    def __init__(self, path: Path, given: int | None = None) -> None:
        self.path = path
        self.piece_bytes: int = given or max(LEAST_BYTES, TIMES_FILE * bytes_on_disk(path))
        share = int(KEPT_SHARE * host_memory_bytes())
        self.limit_bytes: int = given or max(self.piece_bytes, share)
        of_piece = of_all = "as given"
        if not given:
            of_piece = of_all = "the default for a piece of this file"
            if self.limit_bytes == share:
                of_all = "the default, half of the memory of this machine or container"
        self._origins = of_piece, of_all
        self.held_bytes: int = 0
        self.rollout_bytes: int = 0
        self.token_bytes: int = 0

    def check(self, count: int, what: str) -> None:
        """Raises RolloutError if `what`, a piece of `count` bytes, exceeds a limit."""
        of_piece, of_all = self._origins
        if count > self.piece_bytes:
            self._refuse(f"{what} takes {format_bytes(count)}", self.piece_bytes, of_piece)
        if self.held_bytes + count > self.limit_bytes:
            what += f" takes {format_bytes(count)} and {format_bytes(self.held_bytes)} are held"
            self._refuse(what, self.limit_bytes, of_all)

    def _refuse(self, needs: str, limit: int, origin: str) -> NoReturn:
        raise RolloutError(
            f"{self.path}: {needs}, but memory_limit is {format_bytes(limit)}, {origin}. Raise it "
            "(memory_limit=, --memory-limit), for example to 8GB, or read fewer rollouts (limit=, "
            "--limit)."
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
