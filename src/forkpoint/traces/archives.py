"""Torch files as archives, checked before anything of them is loaded. Imports no torch."""

import io
import zipfile
from pathlib import Path
from typing import BinaryIO

from forkpoint.errors import RolloutError
from forkpoint.rollouts import short

_BEGIN = b"PK\x03\x04"


def check_archive(source: Path | BinaryIO, where: str) -> int:
    """The bytes of a file; where it is an archive, checked by its checksums, as torch checks none.

    Raises RolloutError where it is damaged, or holds more than it can without being compressed,
    which torch's are not.
    """
    if isinstance(source, Path):
        size = source.stat().st_size
    else:
        size = source.seek(0, io.SEEK_END)
        source.seek(0)
    try:
        if not zipfile.is_zipfile(source):
            _check_cut(source, where)
            return size
        with zipfile.ZipFile(source) as archive:
            entries = archive.infolist()
            if not any(entry.filename.endswith("data.pkl") for entry in entries):
                raise RolloutError(
                    f"{where} is a zip archive of something else than a torch file: it holds "
                    f"{short([entry.filename for entry in entries])}. Arrays are read from "
                    "safetensors and from what torch.save writes."
                )
            if sum(entry.file_size for entry in entries) > size:
                largest = max(entries, key=lambda entry: entry.file_size)
                raise RolloutError(
                    f"{where}: {largest.filename} in it declares {largest.file_size} bytes, and "
                    f"the whole file has {size}. torch.save does not compress; write it again."
                )
            damaged = archive.testzip()
    except RolloutError:
        raise
    except Exception as error:  # zipfile's are of many kinds as well
        raise RolloutError(
            f"{where} is cut short or damaged: {error}. Copy or write the file again."
        ) from None
    finally:
        if not isinstance(source, Path):
            source.seek(0)
    if damaged is not None:
        raise RolloutError(
            f"{where} is damaged: the checksum of {damaged} in it is wrong. Copy or write the file "
            "again."
        )
    return size


def _check_cut(source: Path | BinaryIO, where: str) -> None:
    """Raises RolloutError for what begins as an archive and does not end as one."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            head = file.read(4)
    else:
        source.seek(0)
        head = source.read(4)
    if head == _BEGIN:
        raise RolloutError(
            f"{where} is cut short: it begins as an archive, as torch files do, and the archive "
            "has no end. Copy or write the file again."
        )
