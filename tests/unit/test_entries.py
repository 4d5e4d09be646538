"""Entries of segments, counted from masks, are those of the head; large batches take no arrays."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint import Rollout, RolloutBatch
from forkpoint.plan import entries
from forkpoint.plan.entries import entries_of, segment_entries
from forkpoint.plan.runs import run_lengths, sort_running
from forkpoint.tree.forest import Forest, build_forest
from strategies import batches


def forest_of(batch: RolloutBatch, **options: bool) -> Forest:
    order = sort_running(batch, run_lengths(batch, **options), last_tokens="last_tokens" in options)
    return build_forest(order, len(batch))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    batch=batches(),
    options=st.sampled_from(({}, {"whole": True}, {"whole": True, "last_tokens": True})),
    uses_temperature=st.booleans(),
    few=st.sampled_from((1, entries.FEW_LABELS)),
)
def test_segments_have_the_entries_of_their_edges(
    batch: RolloutBatch, options: dict[str, bool], uses_temperature: bool, few: int
) -> None:
    forest = forest_of(batch, **options)
    edges = forest.token_edges(batch.offsets)
    expected = entries_of(forest.edges, edges, batch, uses_temperature=uses_temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "FEW_LABELS", few)
        found = segment_entries(forest, batch, uses_temperature=uses_temperature)
    every = np.append(expected.count, 0).astype(np.int64)
    assert found.tolist() == np.add.reduceat(every, forest.edge_offsets)[:-1].tolist()


def test_long_rollouts_are_counted_in_little_memory() -> None:
    tokens = 200_000
    prompt = np.arange(tokens)
    mask = [0] * tokens + [1] * 4
    rollouts = [Rollout(np.append(prompt, [n] * 4), mask, 1.0) for n in range(4)]
    batch = RolloutBatch(rollouts)
    forest = forest_of(batch)
    tracemalloc.start()
    found = segment_entries(forest, batch)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.tolist() == [0, 4, 4, 4, 4]
    assert peak < 2 * tokens
