"""Drawn rows have every pair of values, and whole products every row."""

from itertools import combinations, product

import pytest

from pairwise import pairwise

OPTIONS = (("a", "b"), (0, 1, 2), (None, 7), tuple("wxyz"))


def parts(rows, strength):
    return {part for row in rows for part in combinations(enumerate(row), strength)}


@pytest.mark.parametrize("strength", [1, 2, 3, 4, 9])
def test_every_part_occurs(strength: int) -> None:
    rows = pairwise(*OPTIONS, strength=strength, full=False)
    size = min(strength, len(OPTIONS))
    assert parts(rows, size) == parts(product(*OPTIONS), size)
    assert len(set(rows)) == len(rows) <= 48
    assert rows == pairwise(*OPTIONS, strength=strength, full=False)


def test_pairs_take_fewer_rows() -> None:
    """At least one for each pair of the two longest options."""
    assert 12 <= len(pairwise(*OPTIONS, full=False)) <= 16
    assert len(pairwise(range(30), range(4), range(2), range(2), full=False)) <= 130


def test_rows_that_may_not_be_run_are_left_out() -> None:
    def keep(row):
        return (row[0], row[1]) not in (("a", 0), ("b", 2))

    rows = pairwise(*OPTIONS, keep=keep, full=False)
    assert all(map(keep, rows))
    assert parts(rows, 2) == parts(filter(keep, product(*OPTIONS)), 2)


def test_whole_products() -> None:
    assert pairwise(*OPTIONS, full=True) == list(product(*OPTIONS))
    kept = pairwise(*OPTIONS, keep=lambda row: row[1] == 2, full=True)
    assert kept == [row for row in product(*OPTIONS) if row[1] == 2]


def test_values_need_not_be_hashable() -> None:
    assert pairwise([[1], {2: 3}], [[4]], full=False) == [([1], [4]), ({2: 3}, [4])]
