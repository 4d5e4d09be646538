"""A host that takes lengths of some multiple alone: plans pad every microbatch, and steps are the
same."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import clear_gradients, relative_distance, small_model
from steps import gradients as gradients_of
from torch import nn
from yardstick import Variant

from forkpoint import Config, losses, wrap
from forkpoint.engine.microbatches import microbatch_tokens
from forkpoint.errors import PlanError
from forkpoint.hosts.host import ModelHost
from forkpoint.plan.align import align
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.planner import make_plan
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.testing import lifted_upcasts
from hybrids import HYBRIDS, tiny_hybrid
from lanes import slow_besides
from strategies import batches

pytestmark = pytest.mark.usefixtures("without_sample", "without_lists")

ACROSS = Config(sharing="tree", boundary="across", max_microbatch_tokens=21)
WAYS = {
    "across": ACROSS,
    "mixed": replace(ACROSS, boundary="mixed"),
    "within": replace(ACROSS, boundary="within", max_microbatch_tokens=64),
    "padded": replace(ACROSS, leaf_layout="padded", max_microbatch_tokens=64),
    "recompute": replace(ACROSS, activations="recompute", max_leaf_tokens=17),
    "dense": replace(ACROSS, sharing="none", boundary="across"),
}
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [4.0] * 4,
    "short_factor": [1.0] * 4,
}
"""Where some position lies beyond the longest rollout, frequencies of all tokens change."""


@cache
def model(name: str) -> nn.Module:
    if name == "longrope":
        # phi3 reads where long factors begin from its configuration itself.
        return small_model(
            "phi3",
            rope_parameters=ROPE,
            original_max_position_embeddings=29,
            max_position_embeddings=64,
            pad_token_id=0,
        )
    if name == "windows":
        return Variant("qwen3", window=7, sinks=True).build()
    return tiny_hybrid(name) if name in HYBRIDS else small_model(name)


@cache
def forked_batch() -> RolloutBatch:
    """Two prompts with forks below them, and two whose responses pad each other far beyond either;
    the longest rollout has 29 tokens."""
    rng = np.random.default_rng(5)

    def ids(count: int) -> list[int]:
        return rng.integers(1, 61, count).tolist()

    rollouts = []
    for group, prompt in enumerate((ids(9), ids(14))):
        for fork in ([], ids(4), ids(7)):
            for length in (3, 8):
                tokens = [*prompt, *fork, *ids(length)]
                mask = [0] * len(prompt) + [1] * (len(tokens) - len(prompt))
                rollouts.append(Rollout(tokens, mask, rng.normal(), group_id=str(group)))
    for group, prompt, length in (("a", ids(6), 22), ("b", ids(26), 3)):
        for _ in range(2):
            mask = [0] * len(prompt) + [1] * length
            rollouts.append(Rollout([*prompt, *ids(length)], mask, rng.normal(), group_id=group))
    return RolloutBatch(rollouts)


def step(name: str, config: Config, **given: Any) -> tuple[dict[str, Any], Any]:
    here = model(name)
    clear_gradients(here)
    with lifted_upcasts(here):
        stats = wrap(here, config).forward_backward(forked_batch(), losses.GRPO(), **given)
    return gradients_of(here), stats


@cache
def dense_step(name: str) -> tuple[dict[str, Any], Any]:
    return step(name, WAYS["dense"])


CASES = [
    *(("llama", way) for way in WAYS),
    ("windows", "across"),
    ("windows", "padded"),
    ("longrope", "padded"),
    ("qwen3_5_text", "across"),
    ("qwen3_5_text", "mixed"),
    ("granitemoehybrid", "within"),
]


@pytest.mark.parametrize(("name", "way"), slow_besides(CASES[1::3] + CASES[-1:], CASES))
def test_padded_steps_are_those_without(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, before = dense_step(name)
    monkeypatch.setattr(
        ModelHost, "capabilities", property(lambda _: Capabilities(length_multiple=8))
    )
    lengths: set[int] = set()
    forward = ModelHost.forward

    def seen(self: ModelHost, instruction: Any, inputs: Any, *rest: Any, **kw: Any) -> Any:
        lengths.add(inputs.input_ids.shape[1])
        assert int(inputs.position_ids.max()) < 29  # of no rollout are there more tokens
        return forward(self, instruction, inputs, *rest, **kw)

    monkeypatch.setattr(ModelHost, "forward", seen)
    found, stats = step(name, WAYS[way])
    assert relative_distance(found, wanted) < 1e-12
    torch.testing.assert_close(stats.logprobs, before.logprobs, rtol=0, atol=1e-12)
    assert not any(length % 8 for length in lengths), lengths
    assert stats.plan.padded_tokens > stats.plan.computed_tokens
    # Idle slots are padded as well.
    plain = wrap(model(name), replace(WAYS["across"], max_microbatch_tokens=8)).plan(forked_batch())
    aligned = align([stats.plan.program, plain.program])[0]
    if any(i.idle for i in aligned.instructions):
        found, _ = step(name, WAYS[way], plan=replace(stats.plan, program=aligned))
        assert relative_distance(found, wanted) < 1e-12
        assert not any(length % 8 for length in lengths), lengths


@given(
    batches(max_rollouts=8),
    st.sampled_from((1, 2, 3, 8, 64)),
    st.sampled_from(sorted(WAYS)),
    st.integers(1, 80),
)
@settings(max_examples=60)
def test_lengths_are_multiples_within_the_limit(
    batch: RolloutBatch, multiple: int, way: str, most: int
) -> None:
    config = replace(WAYS[way], max_microbatch_tokens=most)
    able = Capabilities(length_multiple=multiple)
    try:
        plan = make_plan(batch, config=config, capabilities=able)
    except PlanError as error:
        longest = max(1, int(batch.lengths.max()) - 1)
        too_long = config.boundary == "within" and longest > most - most % multiple
        assert most < multiple or too_long, error
        return
    plan.check_host(able)
    for microbatch in plan.microbatches:
        assert microbatch.length % multiple == 0 and microbatch.padded_tokens <= most
        tokens, real = microbatch_tokens(plan, batch, microbatch)
        assert len(tokens) == microbatch.padded_tokens and real.sum() == microbatch.tokens
    assert plan.computed_tokens == make_plan(batch, config=config).computed_tokens or multiple > 1


def test_limits_that_leave_no_multiple_are_refused_with_a_remedy() -> None:
    batch, able = forked_batch(), Capabilities(length_multiple=8)
    with pytest.raises(PlanError, match="raise it to 8 at least"):
        make_plan(batch, config=replace(ACROSS, max_microbatch_tokens=7), capabilities=able)
    within = replace(WAYS["within"], max_microbatch_tokens=31)
    with pytest.raises(PlanError, match=r"at most 24.*Raise max_microbatch_tokens to 32"):
        make_plan(batch, config=within, capabilities=able)
    make_plan(batch, config=replace(within, max_microbatch_tokens=32), capabilities=able)
    with pytest.raises(PlanError, match="multiples of 8"):
        make_plan(batch, config=ACROSS).check_host(able)
