"""Steps of ours beside stock losses of the same wrapped model, in every order."""

from dataclasses import replace
from typing import Any

import pytest
from mixed_calls import MixedCalls, mixed, stock
from processes import run_ranks
from scenarios_of_ranks import (
    BAR,
    EMPTY,
    Scenario,
    in_hybrid_mesh,
    kept_gathered,
    replicated,
    sharded,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from forkpoint.hosts.torch_dist.fsdp_versions import groups_of
from watched import watched

TOGETHER = ("sum", "sum_of_stock_first", "unsynced sum synced sum")
PENDING = (
    "forward function backward",
    "forward logprobs backward",
    "forward loss score backward",
    "dropped logprobs stock",
    "logprobs stock function stock",
    "logprobs stock logprobs stock",
)
UNSYNCED = (
    "unsynced stock score logprobs_dropped synced stock",
    "unsynced stock fails synced stock",
    "unsynced stock fails synced sum",
    "unsynced stock function logprobs stock synced stock",
)
REDUCED_BY_A_STEP = ("unsynced stock synced function", "unsynced stock fails synced logprobs")
"""fully_shard's: a step reduces what was left unreduced, where a stock backward would."""


def hybrid(model: Any) -> nn.Module:
    """Two replicas of one shard."""
    return sharded(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "shard")))


def hybrid_without_all_reduce(model: Any) -> nn.Module:
    return hybrid(model)


def static(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, static_graph=True)


def unused(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def bucket_views(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


FEW = ("sum", "forward function backward", "logprobs stock function stock")
FEW_UNSYNCED = ("unsynced stock score fails synced sum", "unsynced stock synced function")
WAYS = ("microbatch", "step")
CASES = {
    **{
        f"sharded, {gather}": (
            Scenario(gather=gather),  # type: ignore[arg-type]
            (*TOGETHER, *PENDING, *UNSYNCED, *REDUCED_BY_A_STEP),
        )
        for gather in WAYS
    },
    **{
        f"{wrap.__name__}, {gather}": (
            Scenario(wrap=wrap, gather=gather),  # type: ignore[arg-type]
            (*FEW[:2], *FEW_UNSYNCED),
        )
        for wrap in (kept_gathered, hybrid, hybrid_without_all_reduce)
        for gather in WAYS
    },
    "replicated, all": (Scenario(wrap=replicated), (*TOGETHER, *PENDING, *UNSYNCED)),
    **{wrap.__name__: (Scenario(wrap=wrap), FEW) for wrap in (static, unused, bucket_views)},
    "sharded, a rank without rollouts": (Scenario(rollouts=EMPTY), (*FEW, *FEW_UNSYNCED)),
    "replicated, a rank without rollouts": (Scenario(wrap=replicated, rollouts=EMPTY), FEW),
}
SHORT: dict[str, tuple[Scenario, tuple[str, ...]]] = {
    "sharded": (Scenario(), ("unsynced stock fails score synced sum",)),
    "replicated": (
        Scenario(wrap=replicated),
        ("forward function backward sum", "loss update logprobs stock"),
    ),
}


class WithoutAllReduce(MixedCalls):
    """Where others do not synchronise at all, gradients are reduced over shards alone."""

    def _synchronise(self, now: bool) -> None:
        self.model.set_requires_all_reduce(now)


def in_partial_sums(scenario: Scenario, sequences: tuple[str, ...]) -> dict[str, float]:
    return {calls: WithoutAllReduce(scenario).run(calls.split()) for calls in sequences}


@pytest.mark.slow
@pytest.mark.parametrize("name", {**SHORT, **CASES})
def test_gradients_are_those_of_dense_training(name: str) -> None:
    scenario, sequences = {**SHORT, **CASES}[name]
    work = in_partial_sums if scenario.wrap is hybrid_without_all_reduce else mixed
    for errors in run_ranks(2, work, scenario, sequences, limit_s=240):
        assert max(errors.values()) < BAR, errors


@pytest.mark.slow
@pytest.mark.parametrize("work", [mixed, in_partial_sums])
def test_four_ranks_of_a_hybrid_mesh(work: Any) -> None:
    rollouts = (*Scenario().rollouts, [], Scenario().rollouts[0][:3])
    scenario = Scenario(wrap=in_hybrid_mesh, rollouts=rollouts)
    sequences = ("sum", *FEW_UNSYNCED)
    for errors in run_ranks(4, work, scenario, sequences, limit_s=240):
        assert max(errors.values()) < BAR, errors


def lost() -> tuple[float, list[str]]:
    """A step that cannot put accumulated gradients back leaves none, unreduced ones neither."""
    calls = MixedCalls(Scenario())
    calls.policy = calls.policy.with_config(restore_grads=False)
    calls.run(["stock", "unsynced", "stock", "fails", "synced"])
    assert all(p.grad is None for p in calls.inner.parameters())
    for parameter in calls.other.parameters():
        parameter.grad = None
    calls.worst = 0.0
    return calls.run(["stock"]), calls.outcomes


@pytest.mark.slow
def test_what_is_lost_is_lost_as_a_whole() -> None:
    for error, outcomes in run_ranks(2, lost):
        assert error < BAR and outcomes == ["cleared"]


def settings_of_the_user(gather: Any) -> list[bool]:
    """Whether they are as they were after a step: no synchronisation, and not the last backward."""
    calls = MixedCalls(Scenario(gather=gather))
    calls.run(["unsynced"])
    calls.model.set_is_last_backward(False)
    calls.run(["score", "function", "fails", "logprobs"])
    modules = [m for m in calls.model.modules() if isinstance(m, FSDPModule)]
    states = [module._get_fsdp_state() for module in modules]
    groups = [group for module in modules for group in groups_of(module)]
    return [not state._state_ctx.is_last_backward for state in states[:1]] + [
        not group.reduce_grads and not group.all_reduce_grads for group in groups
    ]


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["microbatch", "step"])
def test_settings_are_put_back(gather: str) -> None:
    for found in run_ranks(2, settings_of_the_user, gather):
        assert len(found) > 2 and all(found)


# Failures within one backward
# ------------------------------------------------------------


def failing_beside_stock(wrap: Any) -> tuple[str, str, float]:
    """The plan fails at the end of a backward whose stock term has succeeded."""
    calls = MixedCalls(replace(Scenario(), wrap=wrap, gather="step"))

    def fail(event: str) -> None:
        if event.startswith("backward "):
            raise KeyboardInterrupt

    value = calls._own() + stock(calls.model, calls.rank)
    with pytest.raises(KeyboardInterrupt) as caught, watched(fail):
        value.backward()
    notes = " ".join(caught.value.__notes__)
    calls._wanted_stock()
    assert calls.policy.last_step is not None
    return notes, calls.policy.last_step.gradients, calls.run([])


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [sharded, replicated])
def test_a_plan_that_fails_leaves_the_stock_term(wrap: Any) -> None:
    for notes, gradients, error in run_ranks(2, failing_beside_stock, wrap):
        assert gradients == "unchanged" and error < BAR
        assert "other terms of the loss" in notes
