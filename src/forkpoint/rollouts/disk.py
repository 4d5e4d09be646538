"""Files that are complete or absent. Imports no torch."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".tmp"
PIXELS = ".media.safetensors"
"""Suffix of the file with the inputs of media, after the name of the file of rollouts."""


def pixels_path(path: Path) -> Path:
    """The file beside a file of rollouts that holds the inputs of their media."""
    return path.with_name(path.name + PIXELS)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends. An error leaves `path` unchanged."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent."""
    with replacing(path) as file:
        file.write(content)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name != "posix":
        return  # Windows cannot open folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
