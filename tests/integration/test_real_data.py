"""Real rollouts: what plans make of whole files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from forkpoint import Config, RolloutBatch, load_rollouts
from forkpoint.plan import make_plan

Find = Callable[[str], Path]


@pytest.mark.parametrize(
    ("file", "logical", "once_by_group", "unique", "edges"),
    [
        ("airline.jsonl", 378_424, 281_171, 249_844, 249_843),
        ("rag.jsonl", 705_578, 91_343, 91_222, 91_221),
    ],
)
def test_token_counts_of_whole_files(
    shared_data: Find, file: str, logical: int, once_by_group: int, unique: int, edges: int
) -> None:
    batch = RolloutBatch(load_rollouts(shared_data(file)))
    firsts = batch.token_ids[batch.offsets[:-1]]
    assert len(set(firsts.tolist())) == 1
    by_group = sum(len(set(firsts[members].tolist())) for members in batch.groups())
    for boundary in ("mixed", "across"):
        tree = make_plan(batch, config=Config(sharing="tree", boundary=boundary))
        assert (tree.logical_tokens, tree.unique_tokens) == (logical, unique)
        assert tree.computed_tokens == edges == unique - 1
        # A first token is the label of no edge, so each group's comes on top of its edges.
        group = make_plan(batch, config=Config(sharing="group", boundary=boundary))
        assert group.computed_tokens + by_group == once_by_group
        dense = make_plan(batch, config=Config(sharing="none", boundary=boundary))
        assert dense.computed_tokens == logical - len(batch)
