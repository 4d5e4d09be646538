"""Files that this process has open, with a name or without."""

import contextlib
from pathlib import Path


def open_files(folder: Path) -> list[str]:
    """Those that are or were in a folder."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # what listed the entries is closed
            links.append(str(entry.readlink()))
    return [link for link in links if link.startswith(f"{folder}/")]
