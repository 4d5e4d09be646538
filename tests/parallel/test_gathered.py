"""Sharded weights gathered once a step: exact, without collectives, chosen alike on all ranks."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from scenarios_of_ranks import (
    BAR,
    DEEP,
    UNEQUAL,
    Scenario,
    compared,
    group,
    in_hybrid_mesh,
    model_of,
    on_ranks,
    sharded,
    without_code,
)
from test_ranks import SCENARIOS
from torch import nn
from torch.distributed.fsdp import FSDPModule

import forkpoint
from forkpoint import Config, RolloutBatch
from forkpoint.hosts.torch_dist.fully_sharded import FullySharded
from forkpoint.losses import GRPO, GSPO
from forkpoint.plan.pricing import meters
from lanes import slow_besides
from watched import watched

NAMES = [name for name in SCENARIOS if name.startswith("fully_shard")]
IN_CORE = ("fully_shard, a rank without rollouts",)


@pytest.mark.parametrize("name", slow_besides(IN_CORE, NAMES))
def test_gradients_are_those_of_one_process(name: str) -> None:
    for rank in run_ranks(2, compared, replace(SCENARIOS[name], gather="step")):
        assert rank["gather"] == "step"
        assert rank["error"] < BAR, rank
        assert rank["loss"] < BAR
        assert rank["tokens"][0] == rank["tokens"][1]


@pytest.mark.slow
def test_four_ranks_of_a_hybrid_mesh() -> None:
    """With two passes."""
    rollouts = (*UNEQUAL, [], group(7, 4, 11, 6))
    scenario = Scenario(wrap=in_hybrid_mesh, rollouts=rollouts, loss=GSPO(), gather="step")
    for rank in run_ranks(4, compared, scenario):
        assert rank["gather"] == "step" and rank["error"] < BAR, rank


# Collectives
# ------------------------------------------------------------

COLLECTIVES = {
    "all_gather_single": "gather",
    "all_gather_into_tensor": "gather",  # torch before 2.13
    "reduce_scatter_single": "reduce",
    "reduce_scatter_tensor": "reduce",
    "all_reduce": "all-reduce",
}


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Count collectives of weights and gradients."""
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in COLLECTIVES.items():
            real = getattr(dist, name, None)
            if real is None:
                continue

            def call(*args: Any, _name: str = kind, _real: Any = real, **options: Any) -> Any:
                counts[_name] += 1
                return _real(*args, **options)

            patch.setattr(dist, name, call)
        yield


def collectives(gather: Any) -> tuple[dict[str, int], dict[str, int], int]:
    """Those of a step, those within its program, and the number of FSDP's groups."""
    model = sharded(model_of(Scenario()))
    policy = on_ranks(model, replace(DEEP, self_check=False), gather)
    counts: Counter[str] = Counter()
    seen: list[Counter[str]] = []
    with counted(counts), watched(lambda _: seen.append(counts.copy())):
        policy.forward_backward(RolloutBatch(UNEQUAL[dist.get_rank()]), GRPO(clip=0.2))
    return (
        dict(counts),
        dict(seen[-1] - seen[0]),
        sum(isinstance(m, FSDPModule) for m in model.modules()),
    )


def test_a_step_issues_no_collective_between_its_first_and_its_last() -> None:
    for every, within, groups in run_ranks(2, collectives, "step"):
        assert within == {}
        assert every == {"gather": groups, "reduce": groups}
    for every, within, groups in run_ranks(2, collectives, "microbatch"):
        assert within["gather"] > groups  # they are counted
        assert every["reduce"] == groups


# The choice
# ------------------------------------------------------------


def chosen(budgets: tuple[int | None, ...], config: Config) -> tuple[str, str, int | None]:
    """How weights were held, why, and the budget that was kept to."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        # By the time of the host alone, no order of equal microbatches is faster than another.
        patch.setattr(meters, "HOST_BLOCK_MS", 0.0)
        policy = forkpoint.wrap(sharded(model_of(Scenario())), config)
        if (budget := budgets[rank]) is not None:
            policy.use_memory_budget(budget)
        stats = policy.forward_backward(RolloutBatch(UNEQUAL[rank]), GRPO())
        plan = stats.plan
        again = policy.forward_backward(RolloutBatch(UNEQUAL[rank]), GRPO()).plan
    assert (again.gather, again.memory_budget_bytes) == (plan.gather, plan.memory_budget_bytes)
    said = f"weights gathered {'once a step' if plan.gather == 'step' else 'for each'}"
    assert said in plan.explain() and plan.gather_reason in plan.explain(width=300)
    return plan.gather, plan.gather_reason, plan.memory_budget_bytes


@pytest.mark.slow
def test_ranks_keep_to_the_least_budget_and_choose_alike() -> None:
    roomy, tight = 1 << 30, 700_000
    found = run_ranks(2, chosen, (roomy, None), DEEP)
    assert set(found) == {("step", found[0][1], roomy)}
    assert "faster than lockstep" in found[0][1]
    found = run_ranks(2, chosen, (roomy, tight), DEEP)
    assert {rank[2] for rank in found} == {tight}


def whole_weights_bytes() -> int:
    weights = FullySharded(sharded(model_of(Scenario())))
    return sum(weights.group_bytes())


@pytest.mark.slow
def test_whole_weights_count_against_the_budget() -> None:
    nbytes = max(run_ranks(2, whole_weights_bytes))
    found = run_ranks(2, chosen, (nbytes // 4, nbytes // 4), DEEP)
    assert {rank[0] for rank in found} == {"microbatch"}
    assert all("whole weights" in rank[1] and "memory budget" in rank[1] for rank in found)


# Compiled blocks
# ------------------------------------------------------------


def compiled(gather: Any, fails_on: int) -> tuple[dict[str, Any], str | None]:
    """A step compiled without generating code; on one rank the compiler may fail."""
    failures = []

    def watched(model: nn.Module, config: Config, gather: Any) -> forkpoint.Policy:
        policy = on_ranks(model, config, gather)
        failures.append(policy.host.compiling)
        return policy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", without_code(fails_on))
        patch.setattr("scenarios_of_ranks.on_ranks", watched)
        config = replace(DEEP, compile_blocks=True)
        found = compared(Scenario(config=config, gather=gather, steps=2))
    return found, failures[0].failure


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["step", "microbatch"])
def test_blocks_run_eagerly_on_the_rank_where_the_compiler_fails(gather: str) -> None:
    first, second = run_ranks(2, compiled, gather, 1, limit_s=480)
    assert first[0]["error"] < BAR and second[0]["error"] < BAR
    assert first[1] is None and "no such kernel" in second[1]
