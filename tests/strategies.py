"""Hypothesis strategies: small random batches whose rollouts fork often, and ways to plan them.

Most rollouts grow out of an earlier one, over a vocabulary so small that others meet by chance.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np
from hypothesis import strategies as st

from forkpoint import Rollout, RolloutBatch

COMBINATIONS = tuple(product(("none", "group", "tree"), ("within", "mixed", "across")))
"""Every (sharing, boundary)."""


@contextmanager
def naming(config: object) -> Iterator[None]:
    """An error within it says of which configuration it is.

    Tests of every configuration draw a batch once for all of them, since drawing takes long.
    """
    try:
        yield
    except BaseException as error:
        error.add_note(f"of {config}")
        raise


KINDS = ("new", "fork", "fork", "longer", "shorter", "same")


@st.composite
def token_lists(
    draw: st.DrawFn, *, max_rollouts: int = 12, max_tokens: int = 40
) -> list[list[int]]:
    """1 to `max_rollouts` lists of 1 to `max_tokens` ids below 4."""
    vocab = draw(st.integers(2, 4))
    lists: list[list[int]] = []
    for _ in range(draw(st.integers(1, max_rollouts))):
        kind = draw(st.sampled_from(KINDS)) if lists else "new"
        ids: list[int] = []
        if kind != "new":
            ids = lists[draw(st.integers(0, len(lists) - 1))]
        if kind in ("fork", "shorter"):
            ids = ids[: draw(st.integers(1, len(ids)))]
        if kind in ("new", "fork", "longer"):
            room = max_tokens - len(ids)
            added = draw(st.integers(min(1, room), room))
            ids = ids + [byte % vocab for byte in draw(st.binary(min_size=added, max_size=added))]
        lists.append(ids)
    return lists


@st.composite
def batches(draw: st.DrawFn, *, max_rollouts: int = 12, max_tokens: int = 40) -> RolloutBatch:
    """A batch of `token_lists`, with or without group ids, at one temperature, two, or three."""
    lists = draw(token_lists(max_rollouts=max_rollouts, max_tokens=max_tokens))
    groups = draw(st.sampled_from((0, 1, 3)))
    # The last two differ in their last bit alone.
    several = ((1.0,), (1.0, 0.7), (1.0, 0.7, float(np.nextafter(0.7, 1))))
    temperatures = draw(st.sampled_from(several))
    trained = draw(st.sampled_from((0.0, 0.3, 1.0)))
    # What is left comes from one seed: drawn value by value it takes longer than the tests do.
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rollouts = []
    for ids in lists:
        mask = random.random(len(ids)) < (trained if random.random() < 0.8 else 0.5)
        mask[0] = False
        rollouts.append(
            Rollout(
                ids,
                mask,
                random.normal(size=len(ids)) if random.random() < 0.5 else random.normal(),
                temperature=random.choice(temperatures),
                group_id=str(random.integers(groups)) if groups else None,
            )
        )
    return RolloutBatch(rollouts)
