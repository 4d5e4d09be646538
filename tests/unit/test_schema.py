"""Checks of JSON from files: what they give back, and what they say of what they refuse."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.rollouts.schema import (
    MOST_DEPTH,
    Check,
    SchemaError,
    array,
    finite,
    flag,
    mapping,
    number,
    one_of,
    or_null,
    parse_json,
    record,
    text,
    text_like,
    tree,
    whole,
)

POINT = record({"x": whole(0, 9), "y": whole(0, 9), "name": text}, optional=("name",))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not JSON (Expecting"),
        ("{}".encode("utf-16"), "not JSON ('utf-8' codec"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"[-Infinity]", "not JSON (-Infinity is no number there)"),
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
    assert parse_json(json.dumps(value).encode()) == value == tree(value, "x")


@pytest.mark.parametrize(
    ("check", "taken", "refused"),
    [
        (text, ["", "a"], [None, 1, [], {}]),
        (text_like("[ab]+", "a and b"), ["ab"], ["", "abc", "ab\n", 1]),
        (flag, [True, False], [0, 1, None, "true"]),
        (one_of("a", 1), ["a", 1], ["b", 1.0, True, None, [], {}]),
        (whole(-1, 3), [-1, 0, 3], [-2, 4, 1.0, True, None, "1", 10**5000]),
        (number(0, 2), [0, 2, 1.5], [-1, 2.1, math.nan, math.inf, True, "1", None, 10**400]),
        (number(0, above=True), [1e-300, 1], [0, 0.0, -1, math.nan, 10**400, -(10**400)]),
        (or_null(whole()), [None, 4], [-1, "x", False]),
        (array(whole()), [[], [1, 2], (1,)], [None, {}, "ab", [None], [1, -1]]),
        (array(whole(), length=2), [[1, 2]], [[], [1], [1, 2, 3]]),
        (mapping(whole()), [{}, {"a": 1}], [None, [], {"a": -1}]),
        (tree, [{"a": [1, None, {"b": 0.5}]}], [math.nan, [math.inf], {"a": [[math.nan]]}]),
        (POINT, [{"x": 1, "y": 2}, {"x": 1, "y": 2, "name": "a"}], [{}, {"x": 1}, [], None]),
        (POINT, [], [{"x": 1, "y": 2, "z": 3}, {"x": 10, "y": 0}, {"x": 1, "y": 2, "name": 3}]),
    ],
)
def test_what_checks_take(check: Check, taken: list[Any], refused: list[Any]) -> None:
    for value in taken:
        assert check(value, "x") in (value, tuple(value) if isinstance(value, list) else value)
    for value in refused:
        with pytest.raises(SchemaError):
            check(value, "x")


def test_numbers_that_json_lacks() -> None:
    assert finite({"a": [math.nan, 1.5, (math.inf,)]}) == {"a": [None, 1.5, [None]]}


def test_depth_is_bounded() -> None:
    value: Any = 1
    for _ in range(MOST_DEPTH):
        value = [value]
    assert tree(value, "x") is value
    with pytest.raises(SchemaError, match=f"nested more than {MOST_DEPTH} deep"):
        tree({"a": value}, "x")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"y": 1}, "where.x is missing"),
        ({"x": 1, "y": 10}, "where.y is 10; it takes a whole number from 0 to 9"),
        ({"x": 1, "y": 2, "\x1b[2J<b>": 3}, r"where.'\x1b[2J<b>' is no field of this schema"),
        ({"x": 1, "y": 2, "a" * 5_000: 3}, "where.'aaaaaaaaaa"),
    ],
)
def test_messages_name_the_field(value: Any, said: str) -> None:
    with pytest.raises(SchemaError) as caught:
        POINT(value, "where")
    assert str(caught.value).startswith(said) and len(str(caught.value)) < 400
