"""Attention tables: what each query reads through its launches, against what its path says."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan_packing import plan_of

from forkpoint import Config, Plan, Rollout, RolloutBatch
from forkpoint.ops.attention import AttentionTable
from forkpoint.plan import make_plan
from forkpoint.tree import (
    FROM_CACHE,
    FROM_GATHER,
    FROM_OWN,
    CacheSlots,
    LaunchLayout,
    Microbatch,
    Table,
    full_table,
    windowed_table,
)
from forkpoint.tree.launches import Runs, VisibleKeys
from strategies import COMBINATIONS, batches, naming

EXAMPLES = settings(max_examples=10, derandomize=True, deadline=None)

Slot = tuple[int, int]
"""(FROM_OWN, place of the microbatch) or (FROM_CACHE, place of the cache)."""


def visible(table: Table, window: int = 0) -> dict[int, Counter[Slot]]:
    """How often each query of the microbatch sees each key, launch by launch, as a kernel would."""
    seen: dict[int, Counter[Slot]] = defaultdict(Counter)
    for launch in table.launches:
        q_at, k_at = launch.q_begin, launch.k_begin
        for n, m in zip(launch.q_lengths, launch.k_lengths, strict=True):
            queries, keys = range(q_at, q_at + n), range(k_at, k_at + m)
            q_at, k_at = q_at + n, k_at + m
            for position, query in enumerate(queries):
                last = len(keys) - len(queries) + position if launch.causal else len(keys) - 1
                first = max(0, last + 1 - window) if window else 0
                for place in keys[first : last + 1]:
                    source = launch.source
                    if source == FROM_GATHER:
                        assert table.key_index is not None
                        at = int(table.key_index[place])
                        source, place = (FROM_OWN, at) if at >= 0 else (FROM_CACHE, -1 - at)
                    seen[query][source, place] += 1
    return seen


def on_path(plan: Plan, microbatch: Microbatch) -> dict[int, list[Slot]]:
    """For each real place of the microbatch, all that its token sees without a window, root
    first."""
    own = dict(zip(microbatch.segments, microbatch.segment_begin, strict=True))
    found: dict[int, list[Slot]] = {}
    for segment in microbatch.segments:
        path: list[Slot] = []
        for ancestor in plan.forest.path(segment):
            inside = ancestor in own
            source, begin = (
                (FROM_OWN, own[ancestor]) if inside else (FROM_CACHE, plan.cache_of[ancestor])
            )
            path += [(source, begin + i) for i in range(plan.forest.length[ancestor])]
        above = int(plan.forest.start[segment])
        for i in range(plan.forest.length[segment]):
            found[own[segment] + i] = path[: above + i + 1]
    return found


@EXAMPLES
@given(batch=batches(), microbatch_tokens=st.integers(1, 60), window=st.integers(1, 12))
def test_every_query_sees_its_path_and_nothing_else(
    batch: RolloutBatch, microbatch_tokens: int, window: int
) -> None:
    longest = int(batch.lengths.max())
    for sharing, boundary in COMBINATIONS:
        most = max(microbatch_tokens, longest) if boundary == "within" else microbatch_tokens
        config = Config(sharing=sharing, boundary=boundary, max_microbatch_tokens=most)
        with naming(config):
            check_tables(make_plan(batch, config=config), window)


def check_tables(plan: Plan, window: int) -> None:
    """Every query sees its path and nothing else: all of it, a window, or its chunk."""
    for microbatch in plan.microbatches:
        paths = on_path(plan, microbatch)
        full = full_table(plan.forest, microbatch, plan.cache_of)
        windowed = windowed_table(plan.forest, microbatch, plan.cache_of, window)
        chunked = windowed_table(plan.forest, microbatch, plan.cache_of, window, chunked=True)
        for table, width in ((full, 0), (windowed, window), (chunked, window)):
            AttentionTable(table)
            first = table.launches[0]
            assert (first.q_begin, sum(first.q_lengths)) == (0, microbatch.tokens)
            assert first.causal
            seen = visible(table, width)
            for place, path in paths.items():
                read = (len(path) - 1) % width + 1 if table is chunked else width
                assert seen[place] == Counter(path[-read:] if width else path)
        follows = [plan.forest.parent[s] == above for above, s in pairwise(microbatch.segments)]
        stretches = len(full.launches[0].q_lengths)
        assert stretches == 1 + follows.count(False), "a first child is in its parent's sequence"
        for launch in full.launches[1:]:
            assert not launch.causal, "above a segment all is seen: rectangles"
        assert windowed.key_index is not None
        copied = len(windowed.key_index) - microbatch.tokens
        assert copied <= (window - 1) * len(microbatch.segments), "a bounded copy"
        assert chunked.key_index is not None and len(chunked.key_index) <= len(windowed.key_index)


def test_the_launches_of_a_flat_group_across_microbatches() -> None:
    plan = plan_of(
        [[1, 2, 3, 4, 5, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7, 7, 7]],
        sharing="group",
        boundary="across",
    )
    parent, child = plan.microbatches
    alone = full_table(plan.forest, parent, plan.cache_of)
    assert alone.launches == (LaunchLayout(FROM_OWN, True, 0, 0, (3,), (3,)),)
    table = full_table(plan.forest, child, plan.cache_of)
    assert table.launches == (
        LaunchLayout(FROM_OWN, True, 0, 0, (2, 1, 3), (2, 1, 3)),
        LaunchLayout(FROM_CACHE, False, 0, 0, (6,), (3,)),
    )
    tails = windowed_table(plan.forest, child, plan.cache_of, 3)
    assert tails.launches == (LaunchLayout(FROM_GATHER, True, 0, 0, (2, 1, 3), (4, 3, 5)),)
    assert tails.key_index is not None
    assert tails.key_index.tolist() == [*(-2, -3, 0, 1), *(-2, -3, 2), *(-2, -3, 3, 4, 5)]


def test_keys_of_the_microbatch_do_not_run_on_from_those_of_the_arena() -> None:
    """Though the one's first place is the number that follows the other's last."""
    # A prompt of 3 edges; below it a leaf of 3, and a fork of 2 with two leaves of 1.
    lists = [[1, 2, 3, 4, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8]]
    plan = plan_of(lists, sharing="tree", boundary="across")
    forest = plan.forest
    assert forest.length.tolist() == [3, 2, 1, 1, 3]
    microbatch = replace(
        plan.microbatches[1], segments=(4, 1, 2, 3), segment_begin=(0, 3, 5, 6), tokens=7
    )
    reach = VisibleKeys(forest, microbatch, CacheSlots({0: 0}))
    assert reach.above(1) == reach.above(4) == ((FROM_CACHE, 0, 3),)
    assert reach.above(3) == ((FROM_CACHE, 0, 3), (FROM_OWN, 3, 5))
    table = full_table(forest, microbatch, CacheSlots({0: 0}))
    path = [*((FROM_CACHE, i) for i in range(3)), (FROM_OWN, 3), (FROM_OWN, 4), (FROM_OWN, 6)]
    assert visible(table)[6] == Counter(path)


def test_a_deep_tree_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spine = list(range(1, 402))
    looks: list[int] = []
    rollouts = [Rollout([*spine[: 2 * n], 0, 0], [0] * 2 * n + [1, 1], 1.0) for n in range(1, 201)]
    plan = make_plan(RolloutBatch(rollouts), config=Config(sharing="tree", boundary="across"))
    known = VisibleKeys._known

    def look(keys: VisibleKeys, segment: int) -> Runs | None:
        looks.append(segment)
        return known(keys, segment)

    monkeypatch.setattr(VisibleKeys, "_known", look)
    for microbatch in plan.microbatches:
        full_table(plan.forest, microbatch, plan.cache_of)
    assert len(plan.forest.path(len(plan.forest) - 1)) > 190 and len(plan.microbatches) > 190
    assert len(looks) <= 3 * len(plan.forest)
