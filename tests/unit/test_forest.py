"""The forest of shared segments, and the sorted rollouts that it is built from.

That each rollout is one path, and each edge there once: `test_plan_properties.py`.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.tree.forest import Forest, build_forest, sort_rollouts
from strategies import token_lists

EXAMPLES = settings(max_examples=60, derandomize=True, deadline=None)


@st.composite
def classed_lists(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Token lists, and for each the class within which it may share."""
    lists = draw(token_lists())
    classes = draw(st.lists(st.integers(0, 2), min_size=len(lists), max_size=len(lists)))
    return lists, classes if draw(st.booleans()) else [0] * len(lists)


def ragged(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, lists)])
    return np.asarray([token for ids in lists for token in ids], np.int64), offsets


def forest_of(lists: list[list[int]], classes: list[int] | None = None) -> Forest:
    order = sort_rollouts(*ragged(lists)).grouped(np.asarray(classes or [0] * len(lists)))
    return build_forest(order, len(lists))


def owners(forest: Forest, segment: int) -> list[int]:
    return forest.order[forest.owner_begin[segment] : forest.owner_end[segment]].tolist()


@EXAMPLES
@given(classed_lists())
def test_edges_of_last_tokens_are_those_of_a_token_that_ends_every_rollout(
    batch: tuple[list[list[int]], list[int]],
) -> None:
    lists, classes = batch
    tokens, offsets = ragged(lists)
    found = build_forest(
        sort_rollouts(tokens, offsets, last_tokens=True).grouped(np.asarray(classes)), len(lists)
    )
    # Lower than every other token, for a rollout comes before those that it is a prefix of.
    ended = forest_of([[*(token + 1 for token in ids), 0] for ids in lists], classes)
    for name in vars(ended):
        assert np.array_equal(getattr(found, name), getattr(ended, name)), name
    # Labels are the rollouts' own tokens.
    ends, begins = found.token_edges(offsets), offsets[:-1]
    with_end = ended.token_edges(np.cumsum([0, *(len(ids) + 1 for ids in lists)]))
    assert (ends[begins] == -1).all()
    for rollout, ids in enumerate(lists):
        begin = int(offsets[rollout])
        own = with_end[begin + rollout : begin + rollout + len(ids)]
        assert np.array_equal(ends[begin : begin + len(ids)], own)


@EXAMPLES
@given(classed_lists())
def test_segments_are_maximal_and_parents_come_first(
    batch: tuple[list[list[int]], list[int]],
) -> None:
    forest = forest_of(*batch)
    children = forest.children()
    subtree = forest.subtree_edges()
    assert (forest.length >= 1).all()
    for segment, parent in enumerate(forest.parent.tolist()):
        assert parent < segment
        assert forest.path(segment)[-1] == segment
        below = [s for s in range(len(forest)) if segment in forest.path(s)]
        assert subtree[segment] == forest.length[below].sum()
        assert below == list(range(segment, segment + len(below))), "depth-first order"
        if parent < 0:
            assert forest.start[segment] == 0
            continue
        assert segment in children[parent]
        assert forest.start[segment] == forest.start[parent] + forest.length[parent]
        own, above = set(owners(forest, segment)), set(owners(forest, parent))
        assert own < above, "a child with all of its parent's rollouts is the same segment"
    assert sum(map(len, children)) + int((forest.parent < 0).sum()) == len(forest)


@EXAMPLES
@given(classed_lists(), st.integers(1, 50))
def test_chains_are_as_few_and_as_equal_as_they_can_be(
    batch: tuple[list[list[int]], list[int]], max_tokens: int
) -> None:
    forest = forest_of(*batch)
    chained = forest.chained(max_tokens)
    pieces = iter(chained.length.tolist())
    for length in forest.length.tolist():
        chain = [next(pieces) for _ in range(-(-length // max_tokens))]
        assert sum(chain) == length
        assert max(chain) <= max_tokens
        assert max(chain) - min(chain) <= 1
    assert next(pieces, None) is None


@pytest.mark.parametrize("top", [2**31 - 1, 2**32 - 1, 2**40])
def test_large_ids_are_told_apart_and_sorted_as_numbers(top: int) -> None:
    lists = [[top, 1, top], [top, 1, top - 1], [256, 1], [255, 1], [1, 1]]
    order = sort_rollouts(*ragged(lists))
    assert order.rollouts.tolist() == [4, 3, 2, 1, 0]
    assert order.shared_edges.tolist() == [0, 0, 0, 0, 1]


@EXAMPLES
@given(classed_lists(), st.integers(1, 6))
def test_short_segments_are_left_out_from_the_roots_on(
    batch: tuple[list[list[int]], list[int]], least: int
) -> None:
    lists, classes = batch
    order = sort_rollouts(*ragged(lists)).grouped(np.asarray(classes))
    forest, found = build_forest(order, len(lists)), order.with_segments_of(least)

    def kept(segment: int) -> int:
        """Edges that rollouts share which diverge at the end of a segment."""
        if segment < 0:
            return 0
        parent = int(forest.parent[segment])
        end = int(forest.start[segment] + forest.length[segment])
        return end if parent < 0 or end - kept(parent) >= least else kept(parent)

    def path(rollout: int) -> list[int]:
        segments = [int(forest.leaf[rollout])]
        while segments[-1] >= 0:
            segments.append(int(forest.parent[segments[-1]]))
        return segments

    for at in range(1, len(order.rollouts)):
        first, second = (path(int(order.rollouts[n])) for n in (at - 1, at))
        fork = next(segment for segment in first if segment in second)
        assert found.shared_edges[at] == kept(fork)
    again = found.with_segments_of(least)
    assert np.array_equal(again.shared_edges, found.shared_edges)
    if least == 1:
        assert np.array_equal(found.shared_edges, order.shared_edges)
