"""Products of options, of which the tests run a part that has every pair.

`make test` and `make test-slow` run the part, `make test-full`, or FORKPOINT_FULL_PRODUCTS=1, whole
products. A fault that needs the values of one option or of two together is found by either.
"""

import os
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

from forkpoint import Config

FULL = os.environ.get("FORKPOINT_FULL_PRODUCTS", "0") not in ("", "0")
CANDIDATES = 40
"""Rows that are tried for each that is taken."""

Row = tuple[Any, ...]


def pairwise(
    *options: Sequence[Any],
    strength: int = 2,
    keep: Callable[[Row], bool] = lambda row: True,
    full: bool = FULL,
) -> list[Row]:
    """Rows of the product of `options` in which every pair of values occurs; the same every time.

    Args:
        options: the values of each option.
        strength: the number of options whose values occur in all combinations; 2 for pairs.
        keep: whether a row may be run. A pair that no such row has is left out.
        full: the whole product, as far as it may be run.
    """
    rows = [row for row in product(*options) if keep(row)]
    strength = min(strength, len(options))
    if full:
        return rows
    # Values stand for themselves by their place, since not all can be hashed.
    places = [row for row in product(*map(range, map(len, options))) if keep(_values(options, row))]
    missing = {part for row in places for part in _parts(row, strength)}
    draw, taken = random.Random(0), []
    while missing:
        tried = draw.sample(places, min(CANDIDATES, len(places)))
        best = max(tried, key=lambda row: sum(part in missing for part in _parts(row, strength)))
        covered = missing.intersection(_parts(best, strength))
        if not covered:  # the last pairs are rare: take a row of one of them
            part = min(missing)
            best = next(row for row in places if part in set(_parts(row, strength)))
            covered = missing.intersection(_parts(best, strength))
        missing -= covered
        taken.append(best)
    return [_values(options, row) for row in sorted(taken)]


def _parts(row: Sequence[int], strength: int) -> Iterable[tuple[tuple[int, int], ...]]:
    return combinations(enumerate(row), strength)


def _values(options: Sequence[Sequence[Any]], row: Sequence[int]) -> Row:
    return tuple(values[place] for values, place in zip(options, row, strict=True))


def id_of(value: Any) -> str:
    """A short name of a value for the name of a test; the same in every process."""
    if isinstance(value, Config):
        limit = f"-{value.max_microbatch_tokens}" if value.max_microbatch_tokens else ""
        return f"{value.sharing}-{value.boundary}{limit}"
    return getattr(value, "__name__", str(value))
