"""Rows of a product of options in which every pair of values occurs; the same every time.

A fault that needs the values of one option or of two together is found by these rows.
"""

import random
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

from forkpoint import Config

CANDIDATES = 40
"""Rows that are tried for each that is taken."""


def pairwise(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value of each option."""
    # Values stand for themselves by their place, since not all can be hashed.
    places = list(product(*(range(len(values)) for values in options)))
    missing = {pair for row in places for pair in combinations(enumerate(row), 2)}
    draw, taken = random.Random(0), set()
    while missing:
        tried = draw.sample(places, min(CANDIDATES, len(places)))
        best = max(
            tried, key=lambda row: len(missing.intersection(combinations(enumerate(row), 2)))
        )
        missing -= set(combinations(enumerate(best), 2))
        taken.add(best)
    rows = sorted(taken)
    return [tuple(values[at] for values, at in zip(options, row, strict=True)) for row in rows]


def id_of(value: Any) -> str:
    """A short name of a value for the name of a test; the same in every process."""
    if isinstance(value, Config):
        limit = f"-{value.max_microbatch_tokens}" if value.max_microbatch_tokens else ""
        return f"{value.sharing}-{value.boundary}{limit}"
    return getattr(value, "__name__", str(value))
