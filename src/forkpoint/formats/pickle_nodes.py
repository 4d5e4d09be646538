"""Inert things that a pickle may name or describe, and what values take of memory.

A `Name` is a global by its name. A `Node` is the description of an object. Neither can be called,
and nothing that a file names is imported.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from forkpoint.formats.budget import Budget, Malformed, Unsafe

Builder = Callable[[tuple[Any, ...], Budget], Any]
"""Makes the value of a call from its arguments. Raises Refused for arguments that are wrong."""
Names = Mapping[str, Builder | None]
"""The globals that a pickle may name; None stands for one that may be named and not called."""

ATOMS = frozenset((str, bytes, int, float, bool, type(None)))
MOST_NUMBERED = 4096
"""The most entries of a dict or set with keys that are not text.

Hashes of numbers can be chosen so that all collide, which takes time that grows with the square.
"""
_MOST_PARTS = 8

# Bytes of memory per object, rounded up: CPython 3.11 to 3.14, 64 bit.
SLOT_BYTES = 16
NUMBER_BYTES = 40
TEXT_BYTES = 64
CONTAINER_BYTES = 128
ENTRY_BYTES = 128
NODE_BYTES = 320


class Name:
    """A global that a pickle names: its full name, and nothing of what it stands for."""

    __slots__ = ("full",)

    def __init__(self, full: str) -> None:
        self.full: str = full

    def __repr__(self) -> str:
        return self.full


class Node:
    """A description of an object that a pickle asks for."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()}>"

    def build(self, state: Any) -> None:
        """Takes the state that the pickle sets. Raises Refused where it is not what is written."""
        raise Unsafe(f"it sets the state of {type(self).__name__.lower()}s")


class Opaque(Node):
    """An object whose state is of no use, such as what torch's compiler knows of a tensor."""

    __slots__ = ()

    def build(self, state: Any) -> None:
        """Takes any state, and forgets it."""


def check_keys(keys: list[Any], present: int, *, of_set: bool = False) -> None:
    """Raises Malformed for keys that cannot be hashed, or whose hashes take too long.

    Args:
        keys: the keys of a dict, or the items of a set.
        present: how many entries the dict or set has already.
        of_set: whether it is a set, which may hold objects of no use.
    """
    numbered = present
    for key in keys:
        kind = type(key)
        if kind is str or kind is bytes:
            continue  # their hashes have a secret, so that they cannot be made to collide
        parts = key if kind is tuple and len(key) <= _MOST_PARTS else (key,)
        if not all(type(part) in ATOMS or isinstance(part, np.generic) for part in parts) and not (
            of_set and kind is Opaque
        ):
            raise Malformed(
                f"{kind_of(key)} is a key; keys are text, numbers or short tuples of them"
            )
        numbered += 1
        if numbered > MOST_NUMBERED:
            raise Malformed(
                f"a dict or set has keys that are not text and more than {MOST_NUMBERED} entries"
            )


def kind_of(value: Any) -> str:
    """The kind of a value, for messages; values may be long, deep or cyclic."""
    if type(value) is Name:
        return value.full
    if value is None:
        return "None"
    kind = type(value).__name__.lower()
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
