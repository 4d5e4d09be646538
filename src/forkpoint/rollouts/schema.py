"""Validated JSON, read as dataclasses, from files that others may have changed. Imports no torch.

Readers convert a SchemaError to an error of `forkpoint.errors` with the file and a remedy.
"""

import json
import math
import re
import sys
import types
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from forkpoint.rollouts.batch import short

MOST_WHOLE = 2**62
"""Largest size, count or number of bytes in a file."""
_hints = cache(get_type_hints)


class SchemaError(ValueError):
    """A value that the schema does not allow. The text is a clause without a full stop."""


def read_small(path: Path, most_bytes: int) -> bytes:
    """Read a regular file of at most `most_bytes`.

    Raises SchemaError for a larger file, and for a pipe or a device, which may have no end. Raises
    OSError if the file cannot be read.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise SchemaError("a pipe or a device")
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise SchemaError(f"a file of {path.stat().st_size} bytes; at most {most_bytes} are read")
    return content


def parse_json(content: bytes, *, allow_nan: bool = False) -> Any:
    """Parse strict JSON in UTF-8, without repeated keys, NaN and infinities.

    A byte order mark, as Windows writes it, is left out.

    Raises SchemaError for other text, and for values that Python cannot parse (deep nesting,
    integers of thousands of digits).
    """
    constant = float if allow_nan else _refuse_constant
    try:
        return json.loads(
            content.decode("utf-8-sig"),
            object_pairs_hook=_without_duplicates,
            parse_constant=constant,
        )
    except RecursionError:
        raise SchemaError("not JSON that can be read (nested too deep)") from None
    except SchemaError:
        raise
    except ValueError as error:  # of the decoder, of the parser, and of numbers too long to convert
        raise SchemaError(f"not JSON ({error})") from None


def finite(value: Any) -> Any:
    """Replace numbers that JSON lacks (NaN, infinities) by None."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refuse_constant(name: str) -> float:
    raise SchemaError(f"not JSON ({name} is not allowed)")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise SchemaError(f"an object that has the key {short(twice)} twice")
    return found


def read(kind: Any, value: Any, field: str) -> Any:
    """Convert a JSON value to the type of an annotation.

    Args:
        kind: a dataclass (fields without a default are required, and unknown fields are refused);
            float and int (finite, at least 0), bool, str, Any, a Literal, `X | None`, or a tuple or
            Mapping of these.
        value: result of `parse_json`.
        field: name of the value, for messages.

    Raises SchemaError with the field, the value and the allowed values, and the errors of
    dataclasses.
    """
    origin, of = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else read(of[0], value, field)
    if origin is Literal:
        if not any(type(value) is type(x) and value == x for x in of):
            raise _refused(field, value, " or ".join(map(repr, of)))
        return value
    if origin is tuple:
        length = len(value) if of[-1] is Ellipsis and isinstance(value, list) else len(of)
        if not isinstance(value, list) or len(value) != length:
            raise _refused(field, value, "a list" if of[-1] is Ellipsis else f"a list of {length}")
        return tuple(read(of[0], entry, f"{field}[{n}]") for n, entry in enumerate(value))
    if not is_dataclass(kind) and origin is None:
        return _scalar(kind, value, field)
    if not isinstance(value, dict):
        raise _refused(field or "it", value, "an object")
    if origin is not None:
        return {key: read(of[1], entry, _below(field, key)) for key, entry in value.items()}
    hints, known = _hints(kind), {f.name: f for f in fields(kind)}
    for name, f in known.items():
        if name not in value and f.default is MISSING and f.default_factory is MISSING:
            raise SchemaError(f"{_below(field, name)} is missing; the schema requires it")
    if unknown := [key for key in value if key not in known]:
        raise SchemaError(
            f"{_below(field, unknown[0])} is not a field of this schema, which has "
            f"{', '.join(known)}; a newer forkpoint may have written it"
        )
    found = {key: read(hints[key], entry, _below(field, key)) for key, entry in value.items()}
    make: Any = kind
    return make(**found)


def _scalar(kind: Any, value: Any, field: str) -> Any:
    if kind is str:
        takes, taken = "text", isinstance(value, str)
    elif kind is bool:
        takes, taken = "true or false", isinstance(value, bool)
    elif kind is int:
        takes = f"a whole number from 0 to {MOST_WHOLE}"
        taken = type(value) is int and 0 <= value <= MOST_WHOLE
    else:
        assert kind is float, kind
        takes, taken = "a finite number of at least 0", is_number(value) and value >= 0
    if not taken:
        raise _refused(field, value, takes)
    return kind(value)


def is_number(value: Any) -> bool:
    """Whether a value is a finite JSON number."""
    # A whole number may be too large for a float, so it is compared exactly.
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _refused(field: str, value: Any, takes: str) -> SchemaError:
    return SchemaError(f"{field} is {short(value)}; it takes {takes}")


def _below(field: str, key: str) -> str:
    """Name of a field in another field. Keys that are not identifiers are quoted."""
    name = key if re.fullmatch(r"[\w/.-]{1,80}", key, re.ASCII) else short(key)
    return f"{field}.{name}" if field else name
