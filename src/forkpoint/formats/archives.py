"""Torch files as zip archives, checked in full before anything in them is read. Imports no torch.

torch.save writes one folder of entries that are stored and not compressed. Python's zipfile makes
an object of every entry that a directory declares, accepts archives whose entries overlap or have
the same name, and refuses different archives in different versions. So the directory is read here
(PKWARE's APPNOTE, 4.3).
"""

import struct
import zlib
from typing import NamedTuple

from forkpoint.errors import RolloutError
from forkpoint.formats.budget import Budget
from forkpoint.rollouts import short

BEGIN = b"PK\x03\x04"
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_LARGE = 0xFFFFFFFF
_OBJECT_BYTES = 640
"""Of memory for an entry, besides its name."""


class _Entry(NamedTuple):
    name: str
    encrypted: bool
    method: int
    checksum: int
    stored_bytes: int
    size_bytes: int
    begin: int


def entries_of(content: bytes, where: str, budget: Budget) -> dict[str, memoryview]:
    """The entries of a torch file by their names without the folder.

    Args:
        content: the whole file.
        where: names it in messages.
        budget: what the directory may take.

    Raises RolloutError where the archive is damaged, is of something else, or has an entry that is
    compressed, overlaps another or is there twice.
    """
    listed = _directory(content, where, budget)
    names = [entry.name for entry in listed]
    folders = [name.removesuffix("data.pkl") for name in names if name.count("/") == 1]
    folders = [folder for folder in folders if folder.endswith("/")]
    if len(folders) != 1:
        raise RolloutError(
            f"{where} is a zip archive of something else than a torch file: it holds "
            f"{short(names)}. Arrays are read from safetensors and from what torch.save writes."
        )
    folder = folders[0]
    if f"{folder}constants.pkl" in names:
        raise RolloutError(
            f"{where} is a TorchScript archive, which holds a program. Write rollouts with "
            "torch.save."
        )
    if sum(entry.size_bytes for entry in listed) > len(content):
        largest = max(listed, key=lambda entry: entry.size_bytes)
        raise RolloutError(
            f"{where}: {_shown(largest.name)} in it declares {largest.size_bytes} bytes, and the "
            f"whole file has {len(content)}. torch.save does not compress; write it again."
        )
    view, found, last = memoryview(content), {}, 0
    for entry in sorted(listed, key=lambda entry: entry.begin):
        if entry.method or entry.encrypted or entry.stored_bytes != entry.size_bytes:
            raise RolloutError(
                f"{where}: {_shown(entry.name)} in it is compressed or encrypted. torch.save does "
                "neither; write it again."
            )
        begin = _data_of(content, entry)
        if begin is None or entry.begin < last or not entry.name.startswith(folder):
            raise _damaged(where, f"the entry {_shown(entry.name)} is not where the directory says")
        last = begin + entry.size_bytes
        data = view[begin:last]
        if len(data) != entry.size_bytes or zlib.crc32(data) != entry.checksum:
            raise RolloutError(
                f"{where} is damaged: the checksum of {_shown(entry.name)} in it is wrong. Copy or "
                "write the file again."
            )
        name = entry.name.removeprefix(folder)
        if name in found:
            raise _damaged(where, f"the entry {_shown(entry.name)} is there twice")
        found[name] = data
    return found


def _directory(content: bytes, where: str, budget: Budget) -> list[_Entry]:
    end = len(content) - _END.size
    if end < 0 or content[end : end + 4] != b"PK\x05\x06" or content[-2:] != b"\0\0":
        raise RolloutError(
            f"{where} is cut short: it begins as an archive, as torch files do, and the archive "
            "has no end. Copy or write the file again."
        )
    _, _, _, _, count, size_bytes, begin, _ = _END.unpack_from(content, end)
    locator = end - _LOCATOR64.size
    if locator >= 0 and content[locator : locator + 4] == b"PK\x06\x07":
        end = locator - _END64.size
        if end < 0 or content[end : end + 4] != b"PK\x06\x06":
            raise _damaged(where, "its directory has no end")
        count, size_bytes, begin = _END64.unpack_from(content, end)[-3:]
    if begin + size_bytes != end or count * _ENTRY.size > size_bytes:
        raise _damaged(where, f"its directory declares {count} entries in {size_bytes} bytes")
    budget.take(_OBJECT_BYTES * count + 4 * size_bytes)
    listed = []
    for _ in range(count):
        entry, begin = _entry(content, begin, end)
        if entry is None:
            raise _damaged(where, f"its directory has fewer than {count} entries")
        listed.append(entry)
    if begin != end:
        raise _damaged(where, f"its directory has more than {count} entries")
    return listed


def _entry(content: bytes, at: int, end: int) -> tuple[_Entry | None, int]:
    """The entry of the directory at a position, and where the next begins."""
    if at + _ENTRY.size > end or content[at : at + 4] != b"PK\x01\x02":
        return None, at
    fields = _ENTRY.unpack_from(content, at)
    flags, method, checksum, stored, size = fields[3], fields[4], *fields[7:10]
    begin, name_end = fields[16], at + _ENTRY.size + fields[10]
    after = name_end + fields[11] + fields[12]
    if after > end:
        return None, at
    name = content[at + _ENTRY.size : name_end].decode("utf-8", "replace")
    large = _large_of(content[name_end : name_end + fields[11]])
    values = [large.pop(0) if n == _LARGE and large else n for n in (size, stored, begin)]
    return _Entry(name, bool(flags & 1), method, checksum, values[1], values[0], values[2]), after


def _large_of(extra: bytes) -> list[int]:
    """The 64-bit fields of an entry whose 32-bit ones are full."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            return [int.from_bytes(field[n : n + 8], "little") for n in range(0, len(field) - 7, 8)]
        at += 4 + length
    return []


def _data_of(content: bytes, entry: _Entry) -> int | None:
    """Where the data of an entry begin; None where its own header is another."""
    if entry.begin + _LOCAL.size > len(content) or content[entry.begin : entry.begin + 4] != BEGIN:
        return None
    fields = _LOCAL.unpack_from(content, entry.begin)
    name = entry.begin + _LOCAL.size
    if content[name : name + fields[9]].decode("utf-8", "replace") != entry.name or fields[3]:
        return None
    return name + fields[9] + fields[10]


def _shown(name: str) -> str:
    return name if name.isprintable() and len(name) < 80 else short(name)


def _damaged(where: str, what: str) -> RolloutError:
    return RolloutError(f"{where} is cut short or damaged: {what}. Copy or write the file again.")
