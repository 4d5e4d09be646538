"""Checks of JSON from files that others may have changed. Imports no torch.

A check is a function of a value and of the name of its field. It returns the value, as Python keeps
it, or raises SchemaError with the field, the value met and what is allowed. Readers turn that into
an error of `forkpoint.errors` that names the file, the line and what to do.
"""

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from forkpoint.rollouts.batch import short

T = TypeVar("T")
Check = Callable[[Any, str], Any]

MOST_DEPTH = 32
"""Containers within containers, where any JSON is allowed."""
MOST_WHOLE = 2**53
"""Whole numbers above are not exact in all readers of JSON."""


class SchemaError(ValueError):
    """A value that the schema does not allow; the text is a clause without a full stop."""


def parse_json(content: bytes, *, allow_nan: bool = False) -> Any:
    """The value of strict JSON in UTF-8: no key twice in an object, no NaN, no infinity.

    Raises SchemaError for anything else, and for values that Python cannot hold (nesting too deep,
    integers of thousands of digits).
    """
    constant = float if allow_nan else _refuse_constant
    try:
        return json.loads(
            content.decode(), object_pairs_hook=_without_duplicates, parse_constant=constant
        )
    except RecursionError:
        raise SchemaError("not JSON that can be read (nested too deep)") from None
    except SchemaError:
        raise
    except ValueError as error:  # of the decoder, of the parser, and of numbers too long to convert
        raise SchemaError(f"not JSON ({error})") from None


def finite(value: Any) -> Any:
    """The same tree with numbers that JSON lacks (NaN, infinities) as null."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refuse_constant(name: str) -> float:
    raise SchemaError(f"not JSON ({name} is no number there)")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise SchemaError(f"an object that has the key {short(twice)} twice")
    return found


# Checks of single values ------------------------------------------------------------------------


def _scalar(allowed: str, accepts: Callable[[Any], bool]) -> Check:
    """Check of a single value, which comes back as it is."""

    def check(value: Any, field: str) -> Any:
        if not accepts(value):
            raise SchemaError(f"{field} is {short(value)}; it takes {allowed}")
        return value

    return check


text: Check = _scalar("text", lambda value: isinstance(value, str))
flag: Check = _scalar("true or false", lambda value: isinstance(value, bool))


def text_like(pattern: str, what: str) -> Check:
    """Text that matches all of a regular expression, which `what` describes."""
    return _scalar(what, lambda v: isinstance(v, str) and bool(re.fullmatch(pattern, v)))


def one_of(*values: object) -> Check:
    """One of some texts or whole numbers."""
    # 1.0 and True are equal to 1.
    return _scalar(
        " or ".join(map(repr, values)),
        lambda value: any(type(value) is type(v) and value == v for v in values),
    )


def whole(least: int = 0, most: int = MOST_WHOLE) -> Check:
    """A whole number within bounds, both included."""
    return _scalar(
        f"a whole number from {least} to {most}",
        lambda value: type(value) is int and least <= value <= most,
    )


def number(least: float = -math.inf, most: float = math.inf, *, above: bool = False) -> Check:
    """A finite number within bounds, both included; `above` leaves the least out."""
    bounds = "a finite number"
    if most < math.inf:
        bounds = f"a number from {least:g} to {most:g}"
    elif least > -math.inf:
        bounds = f"a finite number {'above' if above else 'of at least'} {least:g}"
    # A whole number may be too large for a float, and is compared exactly.
    inner = _scalar(
        bounds,
        lambda value: (
            type(value) in (int, float)
            and abs(value) <= sys.float_info.max
            and least <= value <= most
            and not (above and value == least)
        ),
    )
    return lambda value, field: float(inner(value, field))


def or_null(inner: Check) -> Check:
    """null, or what the inner check takes."""

    def check(value: Any, field: str) -> Any:
        try:
            return None if value is None else inner(value, field)
        except SchemaError as error:
            raise SchemaError(f"{error}, or null") from None

    return check


def tree(value: Any, field: str, depth: int = MOST_DEPTH) -> Any:
    """Any JSON of at most MOST_DEPTH containers within each other, without infinities."""
    if isinstance(value, dict | list):
        if not depth:
            raise SchemaError(f"{field} is nested more than {MOST_DEPTH} deep; it takes less")
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            tree(entry, _below(field, str(key)), depth - 1)
    return number()(value, field) if isinstance(value, float) else value


# Checks of containers ---------------------------------------------------------------------------


def array(inner: Check, *, length: int | None = None) -> Check:
    """A list whose every entry the inner check takes, as a tuple."""

    def check(value: Any, field: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise SchemaError(f"{field} is {short(value)}; it takes a list")
        if length is not None and len(value) != length:
            raise SchemaError(f"{field} has {len(value)} entries; it takes {length}")
        return tuple(inner(entry, f"{field}[{index}]") for index, entry in enumerate(value))

    return check


def mapping(inner: Check) -> Check:
    """An object with any keys, whose every value the inner check takes."""

    def check(value: Any, field: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise SchemaError(f"{field} is {short(value)}; it takes an object")
        return {key: inner(entry, _below(field, key)) for key, entry in value.items()}

    return check


def record(
    fields: Mapping[str, Check], *, optional: Iterable[str] = (), others: Check | None = None
) -> Check:
    """An object with these fields.

    Args:
        fields: the check of each field.
        optional: names of those that may be left out; the others must be there.
        others: the check of the values of further fields; None refuses these.
    """
    needed = fields.keys() - set(optional)

    def check(value: Any, field: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise SchemaError(
                f"{field or 'it'} is {short(value)}; it takes an object with {', '.join(fields)}"
            )
        if lacking := [name for name in fields if name in needed and name not in value]:
            raise SchemaError(f"{_below(field, lacking[0])} is missing; it has to be there")
        found: dict[str, Any] = {}
        for key, entry in value.items():
            inner = fields.get(key, others)
            if inner is None:
                raise SchemaError(
                    f"{_below(field, key)} is no field of this schema, which has "
                    f"{', '.join(fields)}; a newer forkpoint may have written it"
                )
            found[key] = inner(entry, _below(field, key))
        return found

    return check


def object_of(kind: type[T], agree: Callable[[T, str], None] | None = None) -> Callable[..., T]:
    """An object with the fields of a dataclass, as that dataclass.

    Args:
        kind: the dataclass. The annotation of each field is Annotated[type, check]. Fields with a
            default may be left out.
        agree: raises SchemaError for fields that do not go together; given the name of the object.
    """
    hints = get_type_hints(kind, include_extras=True)
    known = fields(kind)  # pyright: ignore[reportArgumentType]
    inner = record(
        {item.name: hints[item.name].__metadata__[0] for item in known},
        optional=[item.name for item in known if item.default is not MISSING],
    )

    def check(value: Any, field: str) -> T:
        found = kind(**inner(value, field))
        if agree is not None:
            agree(found, field)
        return found

    return check


def _below(field: str, key: str) -> str:
    """The name of a field within another; keys that are no plain names are quoted."""
    name = key if re.fullmatch(r"[\w/.-]{1,80}", key, re.ASCII) else short(key)
    return f"{field}.{name}" if field else name
