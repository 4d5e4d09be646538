"""Size of the memory of the machine. Imports no torch."""

import os
import sys
from contextlib import suppress
from pathlib import Path

GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the memory limit of a container."""


def host_memory_bytes() -> int:
    """Bytes of the machine's memory, or of the container's limit if that is less.

    Returns 0 on Windows, where Python does not tell it.
    """
    if sys.platform == "win32":
        return 0
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in GROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            total = min(total, int(Path(path).read_text()))
    return total
