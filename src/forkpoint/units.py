"""Amounts of memory as text. Imports no torch."""

import re

from forkpoint.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MOST = 2**63 - 1
"""Largest number of bytes or tokens that int64 holds."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": KIB, "mi": MIB, "gi": GIB, "ti": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d*)?)\s*([kmgt]i?)?b?", re.IGNORECASE)

MemorySize = int | str
"""A number of bytes, or text such as "8GB" or "512 MiB"."""


def size_in_bytes(given: MemorySize | None, name: str = "memory_limit") -> int | None:
    """Number of bytes of a number, or of text such as "8GB", "8 GiB" or "8000000000".

    Raises ConfigError, naming the option `name`, for other values and for less than 1 byte.
    """
    if given is None:
        return None
    size = 0
    if isinstance(given, int) and not isinstance(given, bool):
        size = int(given)
    elif isinstance(given, str) and len(given) < 40 and (found := _SIZE.fullmatch(given.strip())):
        unit = (found[2] or "").lower()
        size = int(float(found[1]) * {**_UNITS, **_BINARY}[unit])
    if size < 1:
        # The command line passes numbers as text.
        bare = isinstance(given, str) and given.lstrip("-").isdigit()
        text = str(given) if bare else repr(given)
        text = text if len(text) <= 80 else f"{text[:77]}..."
        raise ConfigError(
            f"{name} is {text}; it takes a number of bytes of at least 1, or text such as '8GB', "
            "'512MiB'. Leave it out for the default."
        )
    if size > MOST:
        raise ConfigError(
            f"{name} is above {MOST} bytes: it has {size.bit_length()} bits. Give a smaller size, "
            "or leave it out."
        )
    return size


def format_bytes(count: float) -> str:
    """Format a number of bytes for messages: 1.5 GiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{int(count)} bytes"


def exactly(count: int) -> str:
    """Format a number of bytes with the exact number: 1.5 GiB (1,610,612,737 bytes)."""
    return format_bytes(count) if count < KIB else f"{format_bytes(count)} ({count:,} bytes)"
