"""Rows of a product of options in which every pair of values occurs; the same every time.

A fault that needs the values of one option or of two together is found by these rows.
"""

import random
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

from forkpoint import Config

CANDIDATES = 40
"""Rows that are tried for each that is taken."""


def pairwise(
    *options: Sequence[Any], keep: Callable[[tuple[Any, ...]], bool] = lambda row: True
) -> list[tuple[Any, ...]]:
    """Rows of one value of each option; `keep` says whether a row may be run."""
    # Values stand for themselves by their place, since not all can be hashed.
    every = zip(product(*(range(len(x)) for x in options)), product(*options), strict=True)
    rows = {places: row for places, row in every if keep(row)}
    missing = {pair for places in rows for pair in combinations(enumerate(places), 2)}
    draw, taken = random.Random(0), set()
    while missing:
        tried = draw.sample([*rows], min(CANDIDATES, len(rows)))
        found = {row: missing.intersection(combinations(enumerate(row), 2)) for row in tried}
        best = max(tried, key=lambda row: len(found[row]))
        missing -= found[best]
        taken.add(best)
    return [rows[places] for places in sorted(taken)]


def id_of(value: Any) -> str:
    """A short name of a value for the name of a test; the same in every process."""
    if isinstance(value, Config):
        limit = f"-{value.max_microbatch_tokens}" if value.max_microbatch_tokens else ""
        return f"{value.sharing}-{value.boundary}{limit}"
    return getattr(value, "__name__", str(value))
