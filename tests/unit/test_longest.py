"""The search for the longest prompt that fits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forkpoint import Config
from forkpoint.errors import PlanError
from forkpoint.plan import Plan, make_plan
from forkpoint.plan.longest import MOST_TOKENS, STEP_TOKENS, longest, responses_of
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from lanes import slow_besides
from plan_shapes import SHAPE

DEEP = replace(SHAPE, layers=8, windows=(0,) * 8)

GIVEN: dict[str, tuple[int, dict[str, Any]]] = {
    "within a limit": (32, {"boundary": "within", "max_microbatch_tokens": 7000}),
    "on the device": (16, {"prefix_cache": "device", "boundary": "mixed", "sharing": "group"}),
    "some layers on the host": (8, {"host_memory": "12MiB", "boundary": "mixed"}),
    "offloaded as far as allowed": (64, {"activations": "offload", "host_memory": "2MiB"}),
    "a short limit": (4, {"max_microbatch_tokens": 300, "memory_budget": "auto"}),
    "microbatches shorter than the least": (32, {"max_microbatch_tokens": 64}),
    "a whole group": (16, {"boundary": "mixed", "activations": "keep", "checkpointing": "full"}),
    "logits": (4, {"head_logits": "keep", "boundary": "mixed", "checkpointing": "none"}),
}
"""MiB, and options."""


def one_group(prompt: int, responses: Sequence[int]) -> RolloutBatch:
    """A prompt of so many tokens with responses of these lengths, which share nothing."""
    shared = np.arange(prompt) % SHAPE.vocab
    return RolloutBatch(
        Rollout(
            # First tokens differ.
            np.concatenate([shared, (number + np.arange(length)) % SHAPE.vocab]),
            np.repeat([0, 1], [prompt, length]),
            1.0,
            group_id="longest",
        )
        for number, length in enumerate(responses)
    )


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


QUICK = ["within a limit", "on the device", "offloaded as far as allowed", "a whole group"]
QUICK += ["microbatches shorter than the least"]


@pytest.mark.parametrize("name", slow_besides(QUICK, GIVEN))
def test_the_planner_finds_a_plan_up_to_it(name: str) -> None:
    """And none for a step more."""
    mebibytes, given = GIVEN[name]
    responses, budget = [5, 90, 700, 400], mebibytes << 20
    config = Config(**{"memory_budget": budget, **given})

    def plan(prompt: int) -> Plan | None:
        batch = one_group(prompt, responses)
        try:
            return make_plan(batch, DEEP, config, budget_bytes=budget)
        except PlanError:
            return None

    first = plan(100)
    assert first is not None and first.longest_prompt is not None
    tokens = first.longest_prompt.tokens
    assert tokens >= 2 * STEP_TOKENS
    fitting, beyond = plan(tokens), plan(tokens + STEP_TOKENS)
    assert fitting is not None and fitting.fits
    assert beyond is None or not beyond.fits


def test_a_limit_that_nothing_reaches_and_none() -> None:
    batch = one_group(20, [20, 20])
    plan = make_plan(batch, SHAPE, Config(memory_budget="1TB"))
    assert plan.longest_prompt is not None and plan.longest_prompt.tokens == MOST_TOKENS
    said = "at least 2,097,152 prompt tokens fit with 2 responses of 20"
    assert str(plan.longest_prompt) == said
    assert plan.explain().splitlines()[-1] == f"within the budget, {said}"
    for without in (make_plan(batch, SHAPE), make_plan(batch)):
        assert without.longest_prompt is None and "prompt tokens" not in without.explain()


def test_responses_of_the_longest_rollout() -> None:
    batch = RolloutBatch(
        [
            Rollout([9, 9, 9, 9, 9], [0, 1, 1, 1, 1], 1.0, group_id="b"),
            Rollout([1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 0], 1.0, group_id="a"),
            Rollout([1, 2, 6, 7], [0, 0, 1, 1], 1.0, group_id="a"),
            Rollout([1, 2, 6, 7], [0, 0, 0, 0], 1.0, group_id="a"),
            Rollout([9, 9], [0, 1], 1.0, group_id="b"),
        ]
    )
    assert responses_of(batch) == (4, 2)
    untrained = RolloutBatch([Rollout([1, 2], [0, 0], 1.0)])
    assert responses_of(untrained) == responses_of(RolloutBatch([])) == ()
    assert make_plan(untrained, SHAPE, Config(memory_budget="1TB")).longest_prompt is None
