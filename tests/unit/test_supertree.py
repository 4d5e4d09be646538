"""Merging forests: exact for two, near it for three, and by parts where they are large."""

import itertools
import random
import time
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignments import check, check_held, shapes
from forkpoint.plan import align as module
from forkpoint.plan import common_forest
from forkpoint.plan.align import align_shapes
from forkpoint.plan.ordered_forest import Forests
from forkpoint.plan.ordered_forest import Shape as Tree
from forkpoint.plan.supertree import Base, Places, grown
from pairwise import FULL
from random_forests import WILD, Shape

# A forest as the tuple of its trees, each the tuple of its children's.
Nested = tuple["Nested", ...]


def nested(parents: Sequence[int]) -> Nested:
    def below(node: int) -> Nested:
        return tuple(below(child) for child, parent in enumerate(parents) if parent == node)

    return below(-1)


def parents_of(forest: Nested) -> Shape:
    parents: list[int] = []

    def add(trees: Nested, parent: int) -> None:
        for tree in trees:
            parents.append(parent)
            add(tree, len(parents) - 1)

    add(forest, -1)
    return tuple(parents)


@cache
def forests_of(count: int) -> tuple[Nested, ...]:
    """All ordered forests of so many nodes."""
    if not count:
        return ((),)
    return tuple(
        (below, *rest)
        for inside in range(count)
        for below in forests_of(inside)
        for rest in forests_of(count - 1 - inside)
    )


@cache
def holds(forest: Nested, other: Nested) -> bool:
    """Whether deleting nodes of the one gives the other, from the definition."""
    if not other:
        return True
    if not forest:
        return False
    if holds(forest[0], other[0]) and holds(forest[1:], other[1:]):
        return True
    return holds((*forest[0], *forest[1:]), other)


def least_slots(*shapes_: Nested) -> int:
    """The smallest forest that holds all, found by trying all forests."""
    for count in itertools.count(max(len(parents_of(shape)) for shape in shapes_)):
        if any(all(holds(f, shape) for shape in shapes_) for f in forests_of(count)):
            return count
    raise AssertionError


SMALL = [forest for count in range(1, 5) for forest in forests_of(count)]


def test_two_small_shapes_get_the_fewest_slots_there_are() -> None:
    for one, other in itertools.combinations(SMALL, 2):
        pair = [parents_of(one), parents_of(other)]
        alignment = align_shapes(pair)
        check(alignment, pair)
        assert len(alignment.parents) == least_slots(one, other), pair


def test_three_small_shapes_get_nearly_the_fewest_slots_there_are() -> None:
    chosen = random.Random(0).sample(list(itertools.combinations(SMALL, 3)), 200)
    more = 0
    for three in chosen:
        found = len(align_shapes([parents_of(forest) for forest in three]).parents)
        more += found - least_slots(*three)
    assert 0 <= more <= 0.02 * len(chosen)


def children_of(parents: Shape) -> list[tuple[int, ...]]:
    """By node, its children. The last entry has the roots."""
    return [
        tuple(child for child, parent in enumerate(parents) if parent == node)
        for node in [*range(len(parents)), -1]
    ]


def greatest_worth(one: Shape, other: Shape, worth: list[list[int]]) -> int:
    """The greatest worth of laying a shape over another one: the recurrence as it was published."""
    below_one, below_other = children_of(one), children_of(other)

    @cache
    def greatest(trees: tuple[int, ...], others: tuple[int, ...]) -> int:
        if not trees or not others:
            return 0
        u, v = trees[-1], others[-1]
        both = greatest(trees[:-1], others[:-1]) + greatest(below_one[u], below_other[v])
        return max(
            both + worth[u][v],
            *(
                greatest(trees[:-1], others[:cut]) + greatest(below_one[u], others[cut:])
                for cut in range(len(others) + 1)
            ),
            *(
                greatest(trees[:cut], others[:-1]) + greatest(trees[cut:], below_other[v])
                for cut in range(len(trees) + 1)
            ),
        )

    return greatest(below_one[-1], below_other[-1])


@settings(max_examples=250 if FULL else 100, derandomize=True, deadline=None)
@given(shapes(least=1, most=10), shapes(least=1, most=10), st.integers(0, 2**32))
def test_two_shapes_are_laid_over_each_other_for_the_greatest_worth(
    one: Shape, other: Shape, seed: int
) -> None:
    rng = random.Random(seed)
    kinds = [rng.randrange(3) for _ in one]
    by_kind = {kind: np.array([rng.randint(1, 5) for _ in other]) for kind in range(3)}
    shape, base, forests = Tree(list(one)), Tree(list(other)), Forests()
    places = Places(base)
    laid = Base(places, by_kind, 5 * len(one) + 1).lay(shape, forests.of(shape, kinds), forests)
    worth = [by_kind[kind].tolist() for kind in kinds]
    found = sum(worth[node][place] for node, place in enumerate(laid.place) if place >= 0)
    assert found == greatest_worth(one, other, worth)
    forest, old, new = grown(base, laid)
    assert len(forest) == len(one) + len(other) - sum(place >= 0 for place in laid.place)
    check_held(forest.parents, other, old[:-1].tolist())
    check_held(forest.parents, one, new.tolist())
    assert places.choices == len(places.value_of_choice)


LARGE: dict[str, list[Shape]] = {
    "alone": [(-1,) * count for count in (1500, 1490, 1)],
    "one group": [(-1, *[0] * count) for count in (1500, 1490, 3)],
    "a tree before others alone": [(-1, 0, *[-1] * 1500), (-1,) * 1490],
    "chains": [tuple(range(-1, count)) for count in (1500, 1490, 2)],
    "a chain and a group": [tuple(range(-1, 1500)), (-1, *[0] * 1490)],
    "groups": [WILD["flat"](random.Random(seed), 700) for seed in range(4)],
    "mixed": [WILD["mixed"](random.Random(seed), 600) for seed in range(4)],
    "deep": [WILD["deep"](random.Random(seed), 500) for seed in range(4)],
    "chains with leaves": [
        tuple(parent for n in range(500) for parent in (2 * n - 2 if n else -1, 2 * n)),
        (*range(-1, 499), *range(498, -1, -1)),
    ],
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_shapes_are_aligned_in_time(kind: str) -> None:
    module._common.cache_clear()
    began = time.perf_counter()
    alignment = align_shapes(LARGE[kind])
    assert time.perf_counter() - began < 10
    for shape, slots in zip(LARGE[kind], alignment.slots, strict=True):
        check_held(alignment.parents, shape, slots)
    if kind in ("alone", "one group", "a tree before others alone", "chains"):
        assert alignment.ratio == 1
    assert len(alignment.parents) <= sum(map(len, LARGE[kind]))


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(shapes(most=25), min_size=2, max_size=4))
def test_parts_are_valid_whatever_the_limit(found: list[Shape]) -> None:
    whole = len(align_shapes(found).parents)
    patch = pytest.MonkeyPatch()
    for limit in (0, 20, 100, 1000):
        patch.setattr(common_forest, "EXACT_ENTRIES", limit)
        patch.setattr(common_forest, "EXACT_ENTRIES_EACH", limit)
        module._common.cache_clear()
        alignment = align_shapes(found)
        check(alignment, found)
        if len(set(found) - {()}) <= 2:
            assert len(alignment.parents) >= whole
    patch.undo()
    module._common.cache_clear()
