"""Levels of segments of which each takes its state from the one above."""

from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.plan import make_plan
from forkpoint.tree import state_layout


def tree() -> RolloutBatch:
    """One prompt of 3 edges, a fork below it of 1 edge, and leaves of 2, 1 and 3."""
    lists = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 8], [1, 2, 3, 4, 9, 9, 9]]
    return RolloutBatch(Rollout(ids, [0] + [1] * (len(ids) - 1), 1.0) for ids in lists)


def test_levels_of_one_microbatch() -> None:
    plan = make_plan(tree(), config=Config(sharing="tree", boundary="within"))
    assert plan.forest.length.tolist() == [3, 1, 2, 1, 3]
    assert plan.cache_states == 0
    layout = state_layout(plan.forest, plan.microbatches[0], plan.state_of)
    assert [(v.begin.tolist(), v.length.tolist(), v.parent.tolist()) for v in layout.levels] == [
        ([0], [3], [-1]),
        ([3, 7], [1, 3], [0, 0]),
        ([4, 6], [2, 1], [0, 0]),
    ]
    assert [(v.final, v.kept.tolist()) for v in layout.levels] == [
        (True, []),
        (True, []),
        (False, []),
    ]
