"""Changes to JSON values, one at a time: what a file may hold that somebody has changed."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]

HOSTILE = (
    '</script><script>window.pwned=1</script><img src="http://127.0.0.1:9/x" onerror="pwned=1">',
    "\"'><svg/onload=window.pwned=1><a href='javascript:pwned=1'>x</a><!--",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'><iframe src=//127.0.0.1:9>",
    "]]><?xml?><!DOCTYPE x><base href=//127.0.0.1:9><style>*{display:none}</style>",
    "\u202eevil\u2066\u200b\ufeff\u2028\x00\x07\x1b[2J\r\n\t\x7f\x9b",
    "\ud800\udfff\udc00 \U0001f468\u200d\U0001f469 \U000e0041 \uffff",
    "@@data@@ {{7*7}} ${7*7} %s %(x)s $x^2$ \\u003cb\\u003e &lt;b&gt; &amp;",
    "<b>" * 20_000,
    "x" * 100_000,
)
"""Texts that would be markup, scripts, requests or another text if they were taken for it."""


class Raw(str):
    """JSON text that no Python value is written as."""


RAW = tuple(
    map(
        Raw,
        (
            *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e308", "-0", "-0.0", "1e-320"),
            *(
                "9" * 400,
                "9" * 5_000,
                "[" * 5_000 + "]" * 5_000,
                '{"a":' * 2_000 + "1" + "}" * 2_000,
            ),
            *('{"a":1,"a":2}', "01", "+1", "tru", "'x'", "", '"\\ud800"', '"\\u0000"', "[1,]"),
        ),
    )
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 0.5, -0.5, 1e30, -1e30, 1e300, 5e-324),
    *(2**31, -(2**31), 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30),
    *(
        "",
        "0",
        "1",
        "-1",
        "1.5",
        "null",
        "NaN",
        "cpu",
        "cuda",
        "meta",
        "none",
        "auto",
        "tree",
        "../x",
    ),
    *([], {}, [None], [0], [[]], [[0, 1], [2]], {"": None}, {"a": 1}, {"schema": 1}, ["NaN"]),
    *HOSTILE,
)
OPERATIONS = (
    *("value", "value", "value", "raw", "delete", "add", "rename", "twice", "nudge", "nudge"),
    *("swap", "nest", "text", "shorter", "longer"),
)


def nodes(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value of a tree with the path to it, itself first."""
    yield path, value
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from nodes(entry, (*path, key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from nodes(entry, (*path, index))


def kinds_of_nodes(value: Any) -> dict[tuple[str, ...], list[Path]]:
    """Paths that differ in positions of lists alone, together."""
    found: dict[tuple[str, ...], list[Path]] = {}
    for path, _ in nodes(value):
        kind = tuple("*" if isinstance(part, int) else part for part in path)
        found.setdefault(kind, []).append(path)
    return found


def at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value


def replaced(value: Any, path: Path, new: Any) -> Any:
    """A copy of a tree with another value at a path."""
    if not path:
        return new
    value = copy.deepcopy(value)
    at(value, path[:-1])[path[-1]] = new
    return value


def dumps(value: Any) -> str:
    """A tree as JSON, with what is Raw written as it is."""
    raws: list[str] = []

    def marked(entry: Any) -> Any:
        if isinstance(entry, Raw):
            raws.append(entry)
            return f"@raw{len(raws) - 1}@"
        if isinstance(entry, dict):
            return {key: marked(value) for key, value in entry.items()}
        return [marked(value) for value in entry] if isinstance(entry, list) else entry

    text = json.dumps(marked(value), separators=(",", ":"))
    for index, raw in enumerate(raws):
        text = text.replace(f'"@raw{index}@"', raw)
    return text


def mutate(value: Any, rng: random.Random) -> tuple[Any, str]:
    """A copy of a tree with one change, and what was changed."""
    kinds = kinds_of_nodes(value)
    path = rng.choice(kinds[rng.choice(list(kinds))])
    found = at(value, path)
    operation = rng.choice(OPERATIONS)
    new = _changed(value, path, found, operation, rng)
    return new, f"{operation} {'.'.join(map(str, path)) or '(all)'}"


def _changed(value: Any, path: Path, found: Any, operation: str, rng: random.Random) -> Any:
    if operation == "raw":
        return replaced(value, path, rng.choice(RAW))
    if operation == "nest":
        return replaced(value, path, [found] if rng.random() < 0.5 else {"value": found})
    if operation == "text":
        return replaced(value, path, json.dumps(found)[:200])
    if operation == "nudge" and isinstance(found, int | float):
        change = rng.choice((1, -1, 2, -found, found, 10**6, -(10**6), 2**40))
        return replaced(value, path, found + change)
    if isinstance(found, list) and found:
        if operation == "shorter":
            return replaced(value, path, found[:-1])
        if operation == "longer":
            return replaced(value, path, [*found, found[-1]])
        if operation == "swap":
            entries = list(found)
            one, other = rng.randrange(len(found)), rng.randrange(len(found))
            entries[one], entries[other] = entries[other], entries[one]
            return replaced(value, path, entries)
    if isinstance(found, dict) and operation == "add":
        return replaced(value, path, {**found, rng.choice(HOSTILE[:6]): rng.choice(VALUES)})
    if path and operation in ("delete", "rename", "twice"):
        value = copy.deepcopy(value)
        parent = at(value, path[:-1])
        if isinstance(parent, list):
            if operation == "delete":
                del parent[path[-1]]
            else:
                parent.insert(int(path[-1]), found)
        elif operation == "twice":
            fields = ",".join(f"{json.dumps(k)}:{json.dumps(v)}" for k, v in parent.items())
            again = f"{json.dumps(path[-1])}:{json.dumps(found)}"
            return replaced(value, path[:-1], Raw(f"{{{fields},{again}}}"))
        else:
            del parent[path[-1]]
            if operation == "rename":
                parent[rng.choice((*HOSTILE[:6], f"{path[-1]}s"))] = found
        return value
    return replaced(value, path, rng.choice(VALUES))
