"""Files that are complete or absent, and one writer to a folder. Imports no torch."""

import os
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"
"""The file that a writer locks. It stays; the operating system's lock ends with the process."""
TEMPORARY = ".tmp"


def lock_folder(folder: Path) -> FileLock | None:
    """The lock on a folder, taken; None if another writer holds it.

    Raises OSError where the file system cannot lock files.
    """
    lock = FileLock(folder / LOCK, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock


def write_file(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it and rename it."""
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name != "posix":
        return  # Windows cannot open folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
