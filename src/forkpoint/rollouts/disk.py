"""Files that are complete or absent. Imports no torch."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".tmp"
PIXELS = ".media.safetensors"
"""Suffix that the name of a file of rollouts gets for the file with the inputs of media."""


def pixels_path(path: Path) -> Path:
    """Path of the file with the inputs of media, in the folder of a file of rollouts."""
    return path.with_name(path.name + PIXELS)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends. An error leaves `path` unchanged.

    A pipe or a device, such as /dev/null, is written to.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        with path.open("wb") as file:
            yield file
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # Windows cannot open folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_file(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent."""
    with replacing(path) as file:
        file.write(content)
