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
