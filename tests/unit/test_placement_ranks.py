"""Predicted steps of many ranks, and the plans and rules that the benchmark makes them with."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.placement import largest_differences, repeated, verl
from benchmarks.planning.rank_plans import plan_of_rank
from forkpoint import Config, PlanError, Rollout, RolloutBatch
from forkpoint.parallel.placement.items import by_tokens, in_order, split_groups
from forkpoint.parallel.placement.lockstep import predict_step
from forkpoint.parallel.placement.paths import Paths
from forkpoint.plan import MODELS, ModelShape, Plan, make_plan
from forkpoint.tree.forest import build_forest

SHAPE = ModelShape.from_config(MODELS["qwen3-0.6b"])


def batch_of(
    rollouts: Sequence[Sequence[int]], groups: Sequence[int] | None = None
) -> RolloutBatch:
    return RolloutBatch(
        Rollout(
            list(ids),
            [int(i > 0) for i in range(len(ids))],
            1.0,
            group_id=None if groups is None else groups[number],
        )
        for number, ids in enumerate(rollouts)
    )


def dense(lengths: Sequence[int]) -> Plan:
    """A plan without a model whose microbatches have so many tokens, each a rollout."""
    batch = batch_of([[7, *[number] * length] for number, length in enumerate(lengths)])
    config = Config(sharing="none", boundary="within", max_microbatch_tokens=max(lengths))
    plan = make_plan(batch, config=config)
    assert sorted(m.tokens for m in plan.microbatches) == sorted(lengths)
    return plan


def test_a_step_waits_for_the_slowest() -> None:
    # Microbatches run the longest first; forward and backward are 1 and 2 for each token.
    step = predict_step([dense([600, 400]), dense([500, 500])])
    assert step.mean == 3_000
    assert step.lockstep == 3 * (600 + 500)
    assert step.once == 3_000


def test_idle_ranks_and_slots() -> None:
    step = predict_step([dense([600, 600]), dense([600]), None])
    assert step.mean == (3_600 + 1_800 + 0) / 3
    assert step.lockstep == step.once == 3_600
    assert predict_step([None, None]).lockstep == 0
    with pytest.raises(PlanError, match="no programs"):
        predict_step([])


def test_one_rank_waits_for_nobody() -> None:
    batch = batch_of([[1, 2, 3, 4], [1, 2, 5], [1, 6]])
    plan = make_plan(batch, SHAPE)
    step = predict_step([plan])
    assert step.lockstep == step.once == step.mean == pytest.approx(plan.cost)


@given(
    rollouts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=1, max_size=12),
    groups=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
@settings(max_examples=30, deadline=None)
def test_plans_from_paths_are_the_planners(rollouts: list[list[int]], groups: list[int]) -> None:
    batch = batch_of(rollouts, groups[: len(rollouts)])
    plan = plan_of_rank(Paths.of_batch(batch), np.arange(len(batch)), SHAPE)
    if batch.lengths.max() == 1:
        assert plan is None
        return
    costs = [
        make_plan(batch, SHAPE, Config(sharing="tree", boundary=boundary)).cost
        for boundary in ("within", "mixed")
    ]
    costs += [
        make_plan(batch, SHAPE, Config(sharing="none", boundary=boundary)).cost
        for boundary in ("within", "mixed")
    ]
    assert plan is not None
    assert min(costs) <= plan.cost * (1 + 1e-12) or plan.sharing == "group"
    assert plan.cost <= min(costs) * 1.005 * (1 + 1e-12)


def test_copies_are_different_groups() -> None:
    one = batch_of([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]], [0, 0, 1])
    paths = repeated(Paths.of_batch(one), 5)
    # The same with tokens: what follows the tokens that all share is another one in each copy.
    copies = [
        [1, 2, ids[2] + 10 * copy, *ids[3:]]
        for copy in range(3)
        for ids in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6])
    ][:8]
    groups = [0, 0, 1, 2, 2, 3, 4, 4]
    expected = Paths.of_batch(batch_of(copies, groups))
    assert paths.groups.tolist() == expected.groups.tolist() == groups
    found, wanted = (build_forest(p.order, 8) for p in (paths, expected))
    assert found.length.tolist() == wanted.length.tolist()
    assert found.parent.tolist() == wanted.parent.tolist()
    assert found.leaf.tolist() == wanted.leaf.tolist()
    rollouts, edges = np.arange(8), np.ones(8, np.int64)
    assert np.array_equal(paths.labels(rollouts, edges), expected.labels(rollouts, edges))


def test_largest_differences() -> None:
    sizes = np.asarray([8, 7, 6, 5, 4, 1])
    rank = largest_differences(sizes, 2)
    sums = sorted(int(sizes[rank == r].sum()) for r in range(2))
    assert sums == [15, 16] and np.bincount(rank).tolist() == [3, 3]
    # Whole groups, as many on each rank.
    rank = verl(np.asarray([0, 0, 1, 1, 2, 3]), np.asarray([9, 9, 1, 1, 5, 6]), 2)
    assert rank[0] == rank[1] and rank[2] == rank[3]
    assert np.bincount(rank[[0, 2, 4, 5]]).tolist() == [2, 2]


def test_baselines() -> None:
    groups = np.asarray([0, 0, 0, 1, 2, 2])
    assert in_order(groups, 2).tolist() == [0, 0, 0, 1, 1, 1]
    assert in_order(groups, 2, whole_groups=True).tolist() == [0, 0, 0, 0, 1, 1]
    lengths = np.asarray([10, 10, 10, 25, 4, 4])
    assert by_tokens(groups, lengths, 2).tolist() == [0, 0, 0, 1, 1, 1]
    assert len(split_groups(groups, in_order(groups, 4))) == 2
