"""Torch files: zip archives, and the streams that torch wrote before 1.6. Imports no torch.

An archive has a pickle, `data.pkl`, and the bytes of each storage as an entry of its own. A stream
has a magic number, a version, the sizes of the writer's types, the pickle and the keys of its
storages, each of them a pickle, and then each storage: its number of entries and its bytes. A
storage in a pickle is such a stream.
"""

from typing import Any

from forkpoint.formats.archives import BEGIN, entries_of
from forkpoint.formats.budget import Budget, Malformed, Unsafe
from forkpoint.formats.pickle_machine import Machine
from forkpoint.formats.pickle_nodes import Names
from forkpoint.formats.torch_tensors import STORAGE_NAMES, Storage, entry_bytes
from forkpoint.rollouts import short

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_ORDERS = {b"little": False, b"big": True}


def read_torch(content: bytes, where: str, names: Names, budget: Budget) -> tuple[Any, set[int]]:
    """The value of a torch file, with nodes for tensors, and the ids of what may be shared in it.

    Args:
        content: the whole file.
        where: names it in messages.
        names: the globals that it may name.
        budget: what is built is taken from it.

    Raises Refused; and RolloutError for an archive that is damaged.
    """
    if content.startswith(BEGIN):
        return _read_archive(content, where, names, budget)
    return _read_stream(content, names, budget)


def read_storage(content: bytes, where: str, budget: Budget) -> Storage:
    """The storage that a torch file holds alone. Raises as `read_torch` does."""
    budget.take(len(content))
    value, _ = read_torch(content, where, STORAGE_NAMES, budget)
    if type(value) is not Storage:
        raise Malformed(f"a storage holds {short(value)}")
    return value


class _Storages:
    """The storages of one file by their keys."""

    def __init__(self, *, big: bool = False) -> None:
        self.found: dict[str, Storage] = {}
        self._big = big

    def named(self, key: Any, kind: Any, entries: Any) -> tuple[Storage, bool]:
        """The storage of a key, and whether it is a new one."""
        if type(key) is not str:
            raise Malformed(f"a storage has the key {short(key)}")
        made = Storage(kind, entries, big=self._big)
        known = self.found.setdefault(key, made)
        if (known.dtype, known.size_bytes) != (made.dtype, made.size_bytes):
            raise Malformed(f"the storage {short(key)} is of two kinds")
        return known, known is made


def _read_archive(content: bytes, where: str, names: Names, budget: Budget) -> tuple[Any, set[int]]:
    entries = entries_of(content, where, budget)
    order = bytes(entries.get("byteorder", b"little")[:16])
    if order not in _ORDERS:
        raise Malformed(f"its byte order is {short(order)}")
    storages = _Storages(big=_ORDERS[order])

    def storage(saved: Any) -> Storage:
        match saved:
            case ("storage", kind, key, str(), count):
                found, new = storages.named(key, kind, count)
                if new:
                    if f"data/{key}" not in entries:
                        raise Malformed(f"the storage {short(key)} is not in the archive")
                    found.fill(entries[f"data/{key}"])
                return found
        raise Unsafe(f"it has the persistent id {short(saved)}")

    program = entries["data.pkl"]
    budget.take(len(program))
    machine = Machine(bytes(program), names, budget, persistent=storage)
    value = machine.run()
    if machine.at != len(program):
        raise Malformed(f"{len(program) - machine.at} bytes follow the end of its pickle")
    return value, machine.shared


def _read_stream(content: bytes, names: Names, budget: Budget) -> tuple[Any, set[int]]:
    storages = _Storages()

    def storage(saved: Any) -> Storage:
        match saved:
            case ("storage", kind, key, str(), count, None):
                return storages.named(key, kind, count)[0]
        raise Unsafe(f"it has the persistent id {short(saved)}")

    at = 0
    for expected in (_MAGIC, _VERSION, None):
        head = Machine(content, {}, budget, begin=at)
        value, at = head.run(), head.at
        if expected is not None and value != expected:
            raise Malformed(f"it begins with {short(value)}, and torch writes {expected}")
    machine = Machine(content, names, budget, begin=at, persistent=storage)
    value = machine.run()
    listing = Machine(content, {}, budget, begin=machine.at)
    keys, at = listing.run(), listing.at
    named = sorted(storages.found)
    if type(keys) is not list or not all(type(key) is str for key in keys) or sorted(keys) != named:
        raise Malformed(f"it lists the storages {short(keys)}, and names {short(named)}")
    for key in keys:
        at = _fill(storages.found[key], content, at)
    if at != len(content):
        raise Malformed(f"{len(content) - at} bytes follow its last storage")
    return value, machine.shared


def _fill(storage: Storage, content: bytes, at: int) -> int:
    """Sets the bytes of a storage, which come after their number of entries; gives their end."""
    count = int.from_bytes(content[at : at + 8], "little", signed=True)
    if count * entry_bytes(storage.dtype) != storage.size_bytes:
        raise Malformed(f"a storage has {count} entries, and declares {storage.size_bytes} bytes")
    end = at + 8 + storage.size_bytes
    storage.fill(memoryview(content)[at + 8 : end])
    return end
