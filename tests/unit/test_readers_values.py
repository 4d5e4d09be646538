"""Every field of every format with values of every kind: a rollout, or an error that names it.

Through the one place where values of a record become arrays, record.py.
"""

import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from damaged import critic

import dumps
from forkpoint import Rollout
from forkpoint.rollouts.formats import Format, detect
from forkpoint.rollouts.formats.record import Record, RecordError, samples

Make = Callable[[Sequence[Rollout]], dict[str, Any]]


def nested(depth: int) -> list[Any]:
    found: list[Any] = [1]
    for _ in range(depth):
        found = [found]
    return found


def shared(depth: int, count: int) -> list[Any]:
    """Lists that hold one list many times: count ** depth items, and a few bytes."""
    found: list[Any] = [0] * count
    for _ in range(depth - 1):
        found = [found] * count
    return found


KINDS: dict[str, Any] = {
    "None": None,
    "a number": 3,
    "a boolean": True,
    "text": "abc",
    "text of digits": "9" * 10_000,
    "half a surrogate pair": "\ud800",
    "bytes": b"ab",
    "NaN": float("nan"),
    "a number of 5,000 digits": 10**4999,
    "a dict": {"a": 1},
    "nothing in a list": [],
    "ragged lists": [[1, 2], [3]],
    "lists of one length": [[1, 2], [3, 4]],
    "a list 2,000 deep": nested(2000),
    "a list of 10**18 items": shared(6, 1000),
    "None in a list": [1, None, 2],
    "text in a list": [1, "a"],
    "bytes in a list": [b"a"],
    "NaNs": [float("nan")] * 3,
    "floats": [1.0, 2.5],
    "numbers of 71 bits": [2**70, 1],
    "a number beyond floats": [10**400, 1],
    "a number of 64 bits and one below 0": [-1, 2**63],
    "numpy's numbers": [np.int64(1), np.uint64(2**63)],
    "a tuple": (1, 2, 3),
    "one entry more": "more",
    "one entry less": "less",
    "an array of objects": np.array([1, "a", None], object),
    "an array of half floats": np.ones(3, np.float16),
    "an array of complex numbers": np.ones(3, complex),
    "an array of unsigned numbers": np.array([2**64 - 1], np.uint64),
    "an array of no dimension": np.array(3),
    "an array of two": np.ones((2, 3)),
    "an array of no columns": np.ones((5, 0)),
    "numpy's number": np.int64(5),
}
OTHERS = (
    *("temperature", "temperatures", "reward", "rewards", "uid", "group_id", "rollout_id"),
    *("advantage", "advantages", "weights", "rl_weights", "rollout_is_weights"),
    *("importance_sampling_ratio", "values", "returns", "old_values", "position_ids"),
    *("group_index", "remove_sample", "sample_mask", "loss_mask", "meta_info", "extras"),
    *("multi_modal_inputs", "kind"),
)
"""Fields that some format reads and its dumps here have not."""


TABLES: dict[str, Make] = {
    **dumps.TABLES,
    "verl, critic": critic(dumps.verl_critic),
    "openrlhf, critic": critic(dumps.openrlhf_critic),
    "nemo-rl, critic": critic(dumps.nemo_rl_critic),
    "slime, critic": critic(dumps.slime_critic),
    "skyrl": dumps.skyrl,
}


def changed(table: dict[str, Any], field: str, kind: str) -> Iterator[dict[str, Any]]:
    """A sample, a batch, and one row of a batch with that value in a field."""
    row, whole = dumps.rows_of(table)[0], dumps.listed(table)
    column = whole.get(field)
    count = len(dumps.rows_of(table))
    rest = column[1:] if isinstance(column, list) and len(column) == count else [None] * (count - 1)
    value = KINDS[kind]
    if kind in ("one entry more", "one entry less"):
        given = row.get(field)
        if not isinstance(given, list):
            return
        value = [*given, given[0]] if kind == "one entry more" else given[1:]
    else:
        yield {**table, field: value}
    yield {**row, field: value}
    yield {**whole, field: [value, *rest]}


def read(table: dict[str, Any], format: Format) -> None:
    """Reads what can be read of a table; what cannot has to say so, and where."""
    for record in samples("x.pt", table, format, None):
        try:
            for rollout, _ in format.rollouts(record):
                assert isinstance(rollout, Rollout)
        except RecordError as error:
            assert str(error).startswith("x.pt")
            # Those of forkpoint's own fields are Rollout's.
            assert len(str(error)) < 1500 or format.name == "forkpoint"


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_every_field_with_every_kind_of_value(name: str) -> None:
    table = TABLES[name](dumps.truth(groups=2, rollouts_per_group=2))
    format = detect(table, "x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for field in dict.fromkeys([*table, *OTHERS]):
            for at, kind in enumerate(KINDS):
                # A sample, a batch or a row in turn: each kind in each form, over all fields.
                forms = list(changed(table, field, kind))
                turn = zlib.crc32(f"{name} {field}".encode()) + at
                for given in forms[turn % max(1, len(forms)) :][:1]:
                    try:
                        read(given, format)
                    except Exception as error:
                        error.add_note(f"{field} is {kind}")
                        raise


def record(**values: Any) -> Record:
    return Record("here", values)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1, "7"], r"a\[1\] is '7'; it takes one row of whole numbers"),
        ([1, True], r"a\[1\] is True; it takes one row"),
        ([[1], [2]], r"a\[0\] is \[1\]; it takes one row of whole"),
        ([1, 2**63], rf"a\[1\] is {2**63}; it takes one row of whole numbers of 64 bits"),
        (np.array([2**63], np.uint64), rf"a\[0\] is {2**63}, which is more than int64"),
        (np.ones((3, 4), int), r"a has 2 dimensions \(3 x 4\); it takes one row"),
        (np.ones(2), r"a\[0\] is 1.0 \(float64\); it takes one row"),
        ("12", "a is '12'; it takes one row"),
        (None, r"there is no a; the record has \['a'\]"),
        (shared(6, 1000), r"a\[0\] is \[\[\[\.\.\.\], \[\."),
        ([b"x" * 10**6], r"a\[0\] is 1000000 bytes; "),
    ],
)
def test_ids_that_are_none(value: Any, said: str) -> None:
    with pytest.raises(RecordError, match=f"here: {said}"):
        record(a=value).ids("a")


@pytest.mark.parametrize(
    "value", [[1, 2], (1, 2), np.array([1, 2], object), np.array([1, 2], "u1")]
)
def test_ids(value: Any) -> None:
    found = record(a=value).ids("a")
    assert found.dtype == np.int64 and found.tolist() == [1, 2]


@pytest.mark.parametrize("value", [0.5, [0.5], [[0.5]], np.array([[0.5]]), np.float16(0.5)])
def test_one_number(value: Any) -> None:
    assert record(a=value).number("a") == 0.5


def test_rows_of_many_objects_take_the_room_of_their_items() -> None:
    """numpy would make room for the longest text, as many times as there are entries."""
    with pytest.raises(RecordError, match=r"a\[0\] is 'x"):
        record(a=["x" * 10**7, *[1] * 10**6]).ids("a")
