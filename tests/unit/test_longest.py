"""The search for the longest prompt that fits."""

import pytest

from forkpoint.plan.longest import longest, one_group, responses_of
from forkpoint.rollouts.batch import Rollout, RolloutBatch


@pytest.mark.parametrize("start", [None, 1, 70, 500, 10_000])
@pytest.mark.parametrize("most_that_fits", [0, 9, 10, 99, 640, 995, 5000])
def test_the_longest(most_that_fits: int, start: int | None) -> None:
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        assert tokens not in tried, "a length is tried once"
        tried.append(tokens)
        return tokens <= most_that_fits

    found = longest(fits, step=10, most=1000, start=start)
    assert found == min(1000, most_that_fits // 10 * 10)
    assert len(tried) <= 14


def test_a_good_guess_takes_few() -> None:
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= 500

    assert longest(fits, step=10, most=10_000, start=500) == 500
    assert tried == [500, 510]


def test_a_group_like_another() -> None:
    batch = RolloutBatch(
        [
            Rollout([1, 2, 3, 4, 5], [0, 0, 1, 0, 1], 1.0, group_id="a"),
            Rollout([1, 2, 6, 7], [0, 0, 1, 1], 1.0, group_id="a"),
            Rollout([1, 2, 6, 7], [0, 0, 0, 0], 1.0, group_id="a"),
            Rollout([9, 9, 9, 9, 9, 9], [0, 1, 1, 1, 1, 1], 1.0, group_id="b"),
        ]
    )
    assert responses_of(batch) == [3, 2]
    made = one_group(20, responses_of(batch), vocab=8)
    assert made.lengths.tolist() == [23, 22] and made.trained_tokens == 5
    assert responses_of(made) == [3, 2]
    assert made.token_ids.max() < 8
