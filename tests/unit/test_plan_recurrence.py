"""Where segments take their state from: literal layouts, and paths read back from any plan."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint import Config, PlanError, Rollout, RolloutBatch
from forkpoint.plan import Plan, make_plan
from forkpoint.tree import NOTHING, convolution_layout, state_layout
from strategies import COMBINATIONS, batches


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


def paths(plan: Plan, batch: RolloutBatch) -> list[list[int]]:
    """The edges of every segment's path, as (first token of the batch that has them) positions."""
    first = plan.forest.segment_tokens(batch.offsets)
    return [
        [
            int(first[s]) + i
            for s in plan.forest.path(segment)
            for i in range(int(plan.forest.length[s]))
        ]
        for segment in range(len(plan.forest))
    ]


@settings(max_examples=30, derandomize=True, deadline=None)
@given(
    batches(max_rollouts=8, max_tokens=16),
    st.sampled_from(COMBINATIONS),
    st.integers(1, 20),
    st.integers(1, 5),
)
def test_every_token_sees_the_inputs_of_its_path(
    batch: RolloutBatch, combination: tuple[str, str], microbatch_tokens: int, width: int
) -> None:
    """Inputs that convolution and recurrence would read, followed through the schedule."""
    sharing, boundary = combination
    config = Config(
        sharing=sharing,
        boundary=boundary,
        max_microbatch_tokens=microbatch_tokens,
    )  # type: ignore[arg-type]
    try:
        plan = make_plan(batch, config=config)
    except PlanError:
        return
    whole = paths(plan, batch)
    cache: dict[int, list[int]] = {}
    states: dict[int, list[int]] = {}
    live: dict[int, int] = {}
    for _, operation, _, index, *_ in plan.program.instructions:
        microbatch = plan.microbatches[index]
        if operation == "backward":
            for place in [s for s in microbatch.state_index if s >= 0]:
                assert live.pop(place) == index
            continue
        content = {}
        for segment, begin in zip(microbatch.segments, microbatch.segment_begin, strict=True):
            length = int(plan.forest.length[segment])
            content |= dict(
                zip(range(begin, begin + length), whole[segment][-length:], strict=True)
            )
        layout = state_layout(plan.forest, microbatch, plan.state_of)
        ends: list[list[int]] = []
        kept: list[list[int]] = []
        seen: dict[int, list[int]] = {}
        for number, level in enumerate(layout.levels):
            starts = ends if number else states
            now = []
            for begin, length, parent in zip(level.begin, level.length, level.parent, strict=True):
                path = list(starts[int(parent)]) if number or parent >= 0 else []
                for place in range(begin, begin + length):
                    if place in content:  # padding is in nothing that is read
                        path.append(content[place])
                        seen[place] = list(path)
                now.append(path)
            ends = now
            kept.extend(ends[i] for i in level.kept)
        expected = {place: whole_of(plan, microbatch, place, whole) for place in content}
        assert seen == expected
        windows = convolution_layout(plan.forest, microbatch, plan.state_of, width)

        def read(entry: int, content: dict[int, int] = content) -> int:
            if entry >= 0:
                return content.get(entry, -1)
            if entry == NOTHING:
                return NOTHING
            state, place = divmod(-2 - entry, width - 1)
            return cache[state][place]

        again = dict(zip(windows.places.tolist(), windows.window.tolist(), strict=True))
        for place, path in expected.items():
            last = [NOTHING] * (width - len(path)) + path[-width:]
            entries = again.get(place, list(range(place - width + 1, place + 1)))
            assert [read(e) for e in entries] == last
        tails = [[read(e) for e in tail] for tail in windows.tail.tolist()]
        for place, state, tail in zip(layout.kept_index.tolist(), kept, tails, strict=True):
            assert place not in live and place < plan.cache_states
            live[place], states[place], cache[place] = index, state, tail
            before = width - 1
            assert tail == ([NOTHING] * before + state)[len(state) :] if before else tail == []
    assert not live


def whole_of(plan: Plan, microbatch, place: int, whole: list[list[int]]) -> list[int]:
    """The path up to a place of a microbatch."""
    position = int(np.searchsorted(microbatch.segment_begin, place, side="right")) - 1
    segment = microbatch.segments[position]
    after = int(plan.forest.length[segment]) - (place - microbatch.segment_begin[position]) - 1
    return whole[segment][: len(whole[segment]) - after]
