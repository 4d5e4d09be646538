"""JSON lines: one object a line, parsed strictly. Imports no torch."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from forkpoint.errors import RolloutError
from forkpoint.formats.compressed import lines
from forkpoint.formats.limits import MemoryLimit, json_bytes
from forkpoint.rollout_files import REQUIRED
from forkpoint.rollouts import short


def json_lines(path: Path, memory: MemoryLimit) -> Iterator[tuple[int, bytes | bytearray]]:
    """The lines of a file that are not blank, with their numbers, counted from 1.

    Whether it is plain, gzip or zstd is seen from its content, not from its name. What a line takes
    to be parsed is charged to `memory` until the next one is asked for.

    Raises RolloutError where the file is cut short or damaged, or takes more memory than it may.
    """
    yield from lines(path, memory, json_bytes)


def parse_object(line: bytes | bytearray, where: str) -> dict[str, Any]:
    """The JSON object on a line. Raises RolloutError, naming `where`, for anything else."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RolloutError(
            f"{where}: byte {error.start + 1} is 0x{line[error.start]:02x}, which is not UTF-8. "
            "Save the file as UTF-8, plain or compressed with gzip or zstd."
        ) from None
    if text.startswith("\ufeff"):
        raise RolloutError(
            f"{where} begins with a byte order mark. Save the file as UTF-8 without one."
        )
    try:
        record = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        rest = text[error.pos : error.pos + 40].strip()
        raise RolloutError(
            f"{where}, column {error.colno}: not JSON ({error.msg}), at "
            f"{short(rest) if rest else 'the end of the line'}. Each line holds one whole JSON "
            "object."
        ) from None
    except _KeyTwice as error:
        raise RolloutError(f"{where}: {error}. Leave one of the two out.") from None
    except RecursionError:
        raise RolloutError(
            f"{where}: lists or objects are nested too deeply. Write each rollout as one flat "
            "object."
        ) from None
    except ValueError:
        # Of Python's own limit, and with advice on how to raise it.
        raise RolloutError(
            f"{where}: a number has more than {sys.get_int_max_str_digits()} digits. Numbers of a "
            "rollout have a few; look at what wrote the line."
        ) from None
    if not isinstance(record, dict):
        listed = " Write the items of the list one a line." if isinstance(record, list) else ""
        raise RolloutError(
            f"{where} is {short(record)}; each line holds one JSON object with the keys "
            f"{', '.join(REQUIRED)}.{listed}"
        )
    return record


def parse_strictly(content: bytes | bytearray | str) -> Any:
    """JSON as the standard has it: no key twice, no NaN, no infinity.

    Raises ValueError, saying why, for anything else.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


class _KeyTwice(ValueError):
    """An object has a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        seen: set[str] = set()
        # A set's add gives None: the first key that is in it already.
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _KeyTwice(f"the key {short(twice)} is there twice in one object")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
