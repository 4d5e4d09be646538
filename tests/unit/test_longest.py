"""The search for the longest prompt that fits."""

from typing import Any

import numpy as np
import pytest
import torch

from forkpoint import Config, losses, wrap
from forkpoint.errors import ConfigError, PlanError
from forkpoint.plan.longest import STEP_TOKENS, longest, one_group, responses_of
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.testing import tiny_model


@pytest.mark.parametrize("most_that_fits", [0, 9, 10, 39, 40, 640, 995, 5000])
def test_the_longest(most_that_fits: int) -> None:
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        assert tokens not in tried and tokens < 4 * max(10, most_that_fits)
        tried.append(tokens)
        return tokens <= most_that_fits

    found = longest(fits, step=10, most=1000)
    assert found == min(1000, most_that_fits // 10 * 10)
    assert len(tried) <= 14


def test_the_longest_prompt_of_a_policy() -> None:
    """It fits, and one a step longer does not; with more memory it is longer."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 61, 40) for _ in range(2)]
    batch = RolloutBatch([Rollout(x, [0] * 20 + [1] * 20, 1.0, group_id="g") for x in ids])
    model, found = tiny_model("llama", dtype=torch.float32), list[int]()
    for budget in ("4MiB", "8MiB"):
        options: dict[str, Any] = {"max_microbatch_tokens": 512, "memory_budget": budget}
        policy = wrap(model, Config(**options, checkpointing="full", activations="recompute"))
        found.append(tokens := policy.longest_prompt(batch, losses.GSPO()))
        assert policy.plan(one_group(tokens, [20, 20], 61), losses.GSPO()).fits
        with pytest.raises(PlanError, match="memory_budget"):
            policy.plan(one_group(tokens + STEP_TOKENS, [20, 20], 61), losses.GSPO())
    assert 0 < found[0] < found[1]
    with pytest.raises(ConfigError, match=r"memory_budget is 'auto', and there is no limit"):
        wrap(model).longest_prompt(batch)


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
