"""Pickles and torch files that attack their reader are refused by name, and soon."""

import time
import tracemalloc
from itertools import product
from pathlib import Path

import pytest
from hostile_pickles import FIELDS, LARGE, batch
from hostile_torch_files import FILES
from pickle_writer import archive

from forkpoint import RolloutError, load_rollouts
from forkpoint.formats.pickles import load_pickle
from lanes import slow_besides

MOST_SECONDS = 60.0
LIMIT_BYTES = 1 << 18


def refused(path: Path) -> str:
    """The message of the error that the file is refused with."""
    begin = time.process_time()
    with pytest.raises(RolloutError) as caught:
        load_rollouts(path)
    assert time.process_time() - begin < MOST_SECONDS
    message = str(caught.value)
    assert message.startswith(str(path)) and len(message) < 1500 and message.isprintable()
    return message


HEAVY = ("million", "two hundred thousand", " in samples", " in arrays")
"""Of values that take long to read; `make test` reads them in one way."""
PLACES = (("uid", "pkl"), ("other", "pkl"), ("uid", "pt"))
VALUES = [(name, *place) for name, place in product(FIELDS, PLACES)]


def heavy(name: str) -> bool:
    return any(part in name for part in HEAVY)


@pytest.mark.parametrize(
    ("name", "field", "suffix"),
    slow_besides([v for v in VALUES if not heavy(v[0]) or v[1] == "other"], VALUES),
)
def test_a_hostile_value_is_refused(name: str, field: str, suffix: str, tmp_path: Path) -> None:
    """Whether its field is read or not, in a pickle and in a torch file."""
    value, said = FIELDS[name]
    path = tmp_path / f"x.{suffix}"
    content = batch(field, value)
    path.write_bytes(archive({"x/data.pkl": content}) if suffix == "pt" else content)
    assert said in refused(path)


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    content, said = FILES[name]
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    assert said in refused(path)


@pytest.mark.parametrize("name", slow_besides(("lists", "texts", "dicts", "names"), LARGE))
def test_memory_has_a_bound(name: str, tmp_path: Path) -> None:
    """Memory stays below the limit and four times the file, which is held besides."""
    path = tmp_path / "x.pkl"
    path.write_bytes(LARGE[name])
    most_bytes = LIMIT_BYTES + 4 * len(LARGE[name])
    tracemalloc.start()
    try:
        with pytest.raises(RolloutError, match=rf"more than {most_bytes} bytes"):
            load_pickle(path, limit_bytes=LIMIT_BYTES)
        taken_bytes = tracemalloc.get_traced_memory()[1] - len(LARGE[name])
    finally:
        tracemalloc.stop()
    assert taken_bytes < 1.25 * most_bytes + (1 << 21)
