"""One writer to a folder: a lock that ends with its process, however it ends. Imports no torch."""

import errno
import logging
import os
import socket
import sys
from pathlib import Path

LOCK = ".lock"
"""The file that is locked; it says who holds it, and goes when the lock is let go."""
_REFUSED = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
_log = logging.getLogger("forkpoint")


class FolderLock:
    """The right to write into a folder, held by one object of one process at a time.

    It is the operating system's lock on an open file, so that a process that is killed leaves the
    file and no lock.
    """

    def __init__(self, folder: Path) -> None:
        self.path: Path = folder / LOCK
        self._handle: int | None = None
        self._owner: int = 0
        self._locked: bool = False

    def take(self) -> str | None:
        """Take the lock, and return None; or, where it is held already, return by whom."""
        while self._handle is None:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _lock(handle)
                self._locked = True
            except OSError as error:
                if error.errno in _REFUSED:
                    os.close(handle)
                    return self._holder()
                self._locked = False
                _log.warning(
                    "%s cannot be locked (%s): nothing keeps a second writer out of this folder.",
                    self.path,
                    error.strerror,
                )
            # Whoever held it may have taken the file away between our two calls.
            if _is_file(handle, self.path):
                self._handle, self._owner = handle, os.getpid()
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
            else:
                os.close(handle)
        return None

    @property
    def owner(self) -> int:
        """The process that took it."""
        return self._owner

    def keep(self) -> str | None:
        """Make sure that it is held still, and return None; or return by whom it is held now.

        Where its file was removed, or replaced, what another process locks is another file: it is
        taken again, unless somebody else has it.

        Raises OSError where the folder is gone.
        """
        assert self._handle is not None, "it is not held"
        if _is_file(self._handle, self.path):
            return None
        other = FolderLock(self.path.parent)
        holder = other.take()
        if holder is None:
            os.close(self._handle)
            self._handle, self._locked = other._handle, other._locked
        return holder

    def release(self) -> None:
        """Let go; doing so again does nothing."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        # A process that was forked off has the same lock, and is not to end it.
        if self._owner == os.getpid():
            # Windows takes no file away that is open, and one of another holder is not ours.
            if sys.platform != "win32" and _is_file(handle, self.path):
                self.path.unlink(missing_ok=True)
            if self._locked:
                _unlock(handle)
        os.close(handle)

    def _holder(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8") or "another process"
        except OSError:  # it has just been let go, or cannot be read while it is locked
            return "another process"


def _is_file(handle: int, path: Path) -> bool:
    """Whether an open file is the one that has this name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        os.lseek(handle, 1 << 20, os.SEEK_SET)  # beyond what is written, which others may read
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)

    def _unlock(handle: int) -> None:
        os.lseek(handle, 1 << 20, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_UN)
