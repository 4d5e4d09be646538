"""JSON that is read as dataclasses: what is taken, and how refusals name the field."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.rollouts.schema import SchemaError, finite, parse_json, read, read_small


@dataclass(frozen=True)
class Point:
    x: int
    y: int
    name: str = ""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not JSON (Expecting"),
        ("{}".encode("utf-16"), "not JSON ('utf-8' codec"),
        (b"[-Infinity]", "not JSON (-Infinity is not allowed)"),
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "an object that has the key 'c' twice"),
        (b"[" * 100_000, "not JSON that can be read (nested too deep)"),
        (b"9" * 5_000, "not JSON (Exceeds the limit"),
    ],
)
def test_json_that_is_none(content: bytes, said: str) -> None:
    with pytest.raises(SchemaError) as caught:
        parse_json(content)
    assert str(caught.value).startswith(said)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=9))
@settings(max_examples=20, deadline=None)
def test_json_comes_back(value: Any) -> None:
    assert parse_json(json.dumps(value).encode("utf-8-sig")) == value == read(Any, value, "x")


@pytest.mark.parametrize(
    ("kind", "taken", "refused"),
    [
        (str, ["", "a"], [None, 1, [], {}]),
        (bool, [True, False], [0, 1, None, "true"]),
        (Literal["a", 1], ["a", 1], ["b", 1.0, True, None, [], {}]),
        (int, [0, 3, 2**62], [-1, 2**62 + 1, 1.0, True, None, "1", 10**5000]),
        (float, [0, 2, 1.5], [-1, math.nan, math.inf, True, "1", None, 10**400]),
        (int | None, [None, 4], [-1, "x", False]),
        (tuple[int, ...], [[], [1, 2]], [None, {}, "ab", [None], [1, -1]]),
        (tuple[int, int], [[1, 2]], [[], [1], [1, 2, 3], None]),
        (Mapping[str, int], [{}, {"a": 1}], [None, [], {"a": -1}]),
        (dict[str, Any], [{}, {"a": [None]}], [None, []]),
    ],
)
def test_what_is_taken(kind: Any, taken: list[Any], refused: list[Any]) -> None:
    for value in taken:
        assert read(kind, value, "x") == (tuple(value) if isinstance(value, list) else value)
    for value in refused:
        with pytest.raises(SchemaError):
            read(kind, value, "x")


def test_objects_become_dataclasses() -> None:
    assert read(Point, {"x": 1, "y": 2}, "p") == Point(1, 2)
    assert read(tuple[Point, ...], [{"x": 1, "y": 2, "name": "a"}], "p") == (Point(1, 2, "a"),)


def test_numbers_that_json_lacks() -> None:
    assert finite({"a": [math.nan, 1.5, (math.inf,)]}) == {"a": [None, 1.5, [None]]}


def test_files_without_end_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"[]")
    assert read_small(path, 2) == b"[]"
    with pytest.raises(SchemaError, match="a file of 2 bytes; at most 1 are read"):
        read_small(path, 1)
    devices = [Path(os.devnull)]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")  # to open it waits for a writer
        devices.append(tmp_path / "pipe")
    for device in devices:
        with pytest.raises(SchemaError, match="a pipe or a device"):
            read_small(device, 1)
    for missing in (tmp_path, tmp_path / "none"):
        with pytest.raises(OSError, match=missing.name):
            read_small(missing, 1)
