"""Programs that the engine runs: other orders, and shapes common to ranks, give the same step."""

import random
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from steps import forked_batch, relative_distance, small_model, step_error
from torch import nn

from forkpoint import Config, losses, wrap
from forkpoint.errors import PlanError
from forkpoint.losses.base import Loss
from forkpoint.plan import Plan, planner
from forkpoint.plan.align import align
from forkpoint.plan.builder import Builder
from forkpoint.rollouts.batch import RolloutBatch
from hybrids import HYBRIDS, tiny_hybrid
from lanes import slow_besides_every
from programs import equal_costs
from tests.unit.test_program import any_order
from versions import checkpoint_blocks, eager_experts

ACROSS = Config(sharing="tree", boundary="across", max_microbatch_tokens=8, self_check=False)
CONFIGS = {
    "keep": ACROSS,
    "mixed": replace(ACROSS, boundary="mixed", max_microbatch_tokens=14),
    "recompute": replace(ACROSS, activations="recompute"),
    "offload": replace(ACROSS, activations="offload"),
    "dense": replace(ACROSS, sharing="none", boundary="within", max_microbatch_tokens=40),
}
LOSSES: dict[str, Loss] = {"grpo": losses.GRPO(), "gspo": losses.GSPO()}
FAR = 1e-12


CASES = [
    *(("llama", way, loss) for way in CONFIGS for loss in LOSSES),
    ("gemma3_text", "mixed", "gspo"),
    ("qwen3_5_text", "recompute", "grpo"),
    ("qwen3_moe", "keep", "gspo"),
]


@cache
def model(name: str) -> nn.Module:
    if name in HYBRIDS:
        return tiny_hybrid(name)
    if name != "qwen3_moe":
        return small_model(name)
    return eager_experts(
        small_model(name, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    )


def step(
    name: str, config: Config, plan: Plan, loss: Loss, batch: RolloutBatch
) -> tuple[dict[str, torch.Tensor], Any]:
    here = model(name)
    here.zero_grad()
    stats = wrap(here, config).forward_backward(batch, loss, plan=plan)
    assert stats.events == plan.events() == stats.plan.events()
    found = {n: p.grad.clone() for n, p in here.named_parameters() if p.grad is not None}
    here.zero_grad()
    return found, stats


@cache
def planned_step(name: str, way: str, loss: str) -> tuple[Plan, dict[str, torch.Tensor], Any]:
    """The plan of a case, and the step in the plan's own order."""
    plan = wrap(model(name), CONFIGS[way]).plan(forked_batch(), LOSSES[loss])
    return plan, *step(name, CONFIGS[way], plan, LOSSES[loss], forked_batch())


@pytest.mark.parametrize(("name", "way", "loss"), slow_besides_every(6, CASES))
def test_any_order_that_keeps_to_the_dependencies_is_exact(name: str, way: str, loss: str) -> None:
    batch, config = forked_batch(), CONFIGS[way]
    plan, wanted, before = planned_step(name, way, loss)
    rng = random.Random(f"{name} {way} {loss}")
    moved = 0
    for _ in range(2):
        other = plan.reordered(any_order(plan, rng))
        moved += other.program != plan.program
        found, stats = step(name, config, other, LOSSES[loss], batch)
        assert relative_distance(found, wanted) < FAR
        torch.testing.assert_close(stats.logprobs, before.logprobs, rtol=0, atol=1e-13)
        assert stats.loss == pytest.approx(before.loss, rel=1e-12)
    assert moved


@pytest.mark.parametrize(
    ("name", "loss"),
    slow_besides_every(3, [("llama", "grpo"), ("llama", "gspo"), ("qwen3_moe", "gspo")]),
)
def test_programs_aligned_with_those_of_other_ranks_are_exact(name: str, loss: str) -> None:
    """Idle slots, recomputes and heads that other ranks need change nothing."""
    batch = forked_batch()
    planned = {way: planned_step(name, way, loss) for way in CONFIGS}
    # A rank without scores among ranks that have them, and the reverse.
    single = wrap(model(name), CONFIGS["keep"]).plan(batch)
    programs = [*(plan.program for plan, *_ in planned.values()), single.program]
    programs = align(programs, equal_costs(programs))
    assert sum(any(i.idle for i in program.instructions) for program in programs) >= 2
    for (way, (plan, wanted, _)), program in zip(planned.items(), programs, strict=False):
        found, _ = step(name, CONFIGS[way], replace(plan, program=program), LOSSES[loss], batch)
        assert relative_distance(found, wanted) < FAR
    plan = replace(single, program=programs[-1])
    wanted, _ = step(name, CONFIGS["keep"], single, losses.GRPO(), batch)
    found, _ = step(name, CONFIGS["keep"], plan, losses.GRPO(), batch)
    assert relative_distance(found, wanted) < FAR


def test_a_plan_without_scores_is_refused_for_a_loss_that_needs_them() -> None:
    batch, policy = forked_batch(), wrap(model("llama"), CONFIGS["keep"])
    with pytest.raises(PlanError, match=r"policy\.plan\(batch, loss\)"):
        policy.forward_backward(batch, losses.GSPO(), plan=policy.plan(batch))
    assert all(p.grad is None for p in model("llama").parameters())


def test_a_plan_with_scores_serves_any_loss() -> None:
    batch, policy = forked_batch(), wrap(model("llama"), CONFIGS["keep"])
    plan = policy.plan(batch, losses.GSPO())
    found, stats = step("llama", CONFIGS["keep"], plan, losses.GRPO(), batch)
    wanted, _ = step("llama", CONFIGS["keep"], policy.plan(batch), losses.GRPO(), batch)
    assert stats.events[0] == "score prefix 0" and relative_distance(found, wanted) < FAR


def test_a_plan_from_before_gradient_checkpointing_is_refused() -> None:
    here = small_model("llama")
    batch, policy = forked_batch(), wrap(here, CONFIGS["recompute"])
    plan = policy.plan(batch)
    here.train()
    checkpoint_blocks(here, use_reentrant=False)
    with pytest.raises(PlanError, match="ends forwards inside the last block"):
        policy.forward_backward(batch, losses.GRPO(), plan=plan)
    policy.forward_backward(batch, losses.GRPO(), plan=policy.plan(batch))


@pytest.mark.parametrize("way", ["keep", "mixed"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_steps_without_short_forks_are_exact(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, policy = forked_batch(), wrap(model(name), CONFIGS[way])
    every = policy.plan(batch)
    monkeypatch.setattr(planner, "Builder", partial(Builder, least_segment=4))
    fewer = policy.plan(batch)
    assert (every.least_segment, fewer.least_segment) == (0, 4)
    assert every.computed_tokens < fewer.computed_tokens < fewer.logical_tokens
    assert step_error(model(name), batch, LOSSES["grpo"], CONFIGS[way], policy=policy) < 1e-10
