"""Router losses and counts of experts on two ranks, beside one process with all rollouts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from scenarios_of_ranks import (
    BAR,
    DEEP,
    EMPTY,
    UNEQUAL,
    distance,
    gradients,
    on_ranks,
    replicated,
    sharded,
)
from torch import nn

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.engine.routing import Routing
from forkpoint.losses import GRPO, GSPO, FunctionLoss, RouterLoss
from forkpoint.testing import lifted_upcasts, tiny_model
from lanes import slow_besides
from versions import skip_without_router_logits

COEFFICIENTS: dict[str, Any] = {"load_balancing": 0.7, "z": 0.05}
WITHIN = Config(sharing="tree", boundary="within")


def mixture() -> Any:
    sizes: dict[str, Any] = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
    }
    model = tiny_model("qwen3_moe", dtype=torch.float64, experts_implementation="eager", **sizes)
    return model.train()


def biased() -> Any:
    sizes: dict[str, Any] = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    model = tiny_model("glm4_moe", dtype=torch.float64, experts_implementation="eager", **sizes)
    return model.train()


@dataclass(frozen=True)
class Routed:
    """A step with a router loss, on ranks and in one process."""

    wrap: Callable[[Any], nn.Module] = sharded
    gather: Any = "microbatch"
    rollouts: tuple[list[Rollout], ...] = UNEQUAL
    scope: Any = "batch"
    """Or "lists": of each rank's rollouts, the first, and the others."""
    given: bool = False
    last_token: bool = True
    loss: Any = field(default_factory=lambda: GRPO(clip=0.2))
    config: Config = DEEP


def lists_of(count: int, first: int = 0) -> list[list[int]]:
    parts = [[first], list(range(first + 1, first + count))]
    return [part for part in parts if part] if count else []


def routers(case: Routed, rank: int) -> tuple[RouterLoss, RouterLoss]:
    """That of a rank, and that of one process."""
    scopes = [case.scope, case.scope]
    if case.scope == "lists":
        counts = [len(part) for part in case.rollouts]
        firsts = np.cumsum([0, *counts]).tolist()
        every = [lists_of(count, first) for count, first in zip(counts, firsts, strict=False)]
        scopes = [lists_of(counts[rank]), [part for parts in every for part in parts]]
    own, whole = (
        RouterLoss(scope=scope, last_token=case.last_token, **COEFFICIENTS) for scope in scopes
    )
    return own, whole


def beside_one_process(
    policies: tuple[forkpoint.Policy, forkpoint.Policy],
    rollouts: Sequence[list[Rollout]],
    place: int,
    router_losses: tuple[RouterLoss, RouterLoss],
    loss: Any,
    *,
    given: bool = False,
) -> tuple[Any, Any, dict[str, float]]:
    """A step with a router loss on this rank, and of all rollouts in one process.

    policies: of the ranks, and of one process; `router_losses` likewise.
    rollouts: by data rank; this rank has those at `place`.
    given: whether the step is given the counts of a pass of scores.

    Returns the step's results, the scores, and differences by name.
    """
    (policy, alone), (own, whole) = policies, router_losses
    batch, every = RolloutBatch(rollouts[place]), RolloutBatch([r for p in rollouts for r in p])
    with lifted_upcasts(policy.host.model), lifted_upcasts(alone.host.model):
        scored: Any = policy.score(batch, router=own)
        value: Any = alone.score(every, router=whole)
        counts = scored.expert_counts if own.scope == "batch" else scored.rollout_expert_counts
        counts = counts if given else None
        stats: Any = policy.forward_backward(batch, loss, router=own, router_counts=counts)
        wanted: Any = alone.forward_backward(every, loss, router=whole)
    begin = sum(len(part) for part in rollouts[:place])
    here = value.rollout_expert_counts[begin : begin + len(batch)]
    assert stats.router_loss and wanted.router_loss and value.router_loss
    return (
        stats,
        scored,
        {
            "loss": abs(stats.loss - wanted.loss),
            "router loss": abs(stats.router_loss - wanted.router_loss),
            "scored": abs(scored.router_loss - value.router_loss),
            "counts": float(not torch.equal(stats.expert_counts, value.expert_counts)),
            "own counts": float(not torch.equal(stats.rollout_expert_counts, here)),
        },
    )


def apart(model: nn.Module, other: nn.Module, gates: Sequence[str]) -> dict[str, float]:
    """Distances of gradients: of all, and of routers."""
    found, expected = gradients(model), gradients(other)
    assert len(gates) > 1
    few, few_expected = ({n: each[n] for n in gates} for each in (found, expected))
    return {
        "error": distance(found, expected, list(expected)),
        "routers": distance(few, few_expected, gates),
    }


def compared(case: Routed) -> dict[str, Any]:
    """Differences of a step on this rank from one process."""
    rank = dist.get_rank()
    model, other = mixture(), mixture()
    policies = (
        on_ranks(case.wrap(model), case.config, case.gather),
        forkpoint.wrap(other, case.config),
    )
    stats, scored, found = beside_one_process(
        policies, case.rollouts, rank, routers(case, rank), case.loss, given=case.given
    )
    gates = [name for name, _ in other.named_parameters() if name.endswith("gate.weight")]
    return {
        **found,
        **apart(model, other, gates),
        "own": scored.own_router_loss,
        "of all": scored.router_loss,
        "computed": int(stats.computed_expert_counts.sum()),
        "passes": sum(event.startswith("score") for event in stats.events),
    }


DIFFERENCES = ("error", "routers", "loss", "router loss", "scored", "counts", "own counts")


def faults(found: list[dict[str, Any]]) -> list[str]:
    return [
        f"{name} of rank {rank} off by {each[name]:.1e}"
        for rank, each in enumerate(found)
        for name in DIFFERENCES
        if not each[name] < BAR
    ]


FIRST_EMPTY = (EMPTY[1], [])
CASES = {
    "fully_shard, batch": Routed(),
    "fully_shard, batch, counts given": Routed(given=True),
    "fully_shard, rollout": Routed(scope="rollout"),
    "fully_shard, lists": Routed(scope="lists", given=True),
    "fully_shard, one microbatch each": Routed(config=WITHIN),
    "fully_shard, without last tokens": Routed(last_token=False, scope="rollout", given=True),
    "fully_shard, a coupling loss": Routed(loss=GSPO()),
    "fully_shard, a rank without rollouts": Routed(rollouts=EMPTY),
    "fully_shard, the last without": Routed(rollouts=FIRST_EMPTY, scope="rollout"),
    "fully_shard, gathered once": Routed(gather="step"),
    "fully_shard, gathered once, a rank without": Routed(gather="step", rollouts=EMPTY),
    "fully_shard, auto": Routed(gather="auto", scope="lists"),
    "DistributedDataParallel, batch": Routed(wrap=replicated),
    "DistributedDataParallel, counts given": Routed(wrap=replicated, given=True, last_token=False),
    "DistributedDataParallel, rollout": Routed(wrap=replicated, scope="rollout", config=WITHIN),
    "DistributedDataParallel, a rank without": Routed(wrap=replicated, rollouts=EMPTY),
    "DistributedDataParallel, lists, a coupling loss": Routed(
        wrap=replicated, scope="lists", loss=GSPO(), rollouts=FIRST_EMPTY
    ),
}
IN_CORE = ("fully_shard, batch",)


@pytest.mark.parametrize("name", slow_besides(IN_CORE, CASES))
def test_router_losses_are_those_of_one_process(name: str) -> None:
    case = CASES[name]
    found = run_ranks(2, compared, case)
    assert not faults(found), found
    if case.scope == "batch" and not case.given:
        assert any(each["passes"] for each in found)
    if case.given and not isinstance(case.loss, GSPO):
        assert not any(each["passes"] for each in found)
    assert found[0]["computed"] == found[1]["computed"]
    owns, total = [each["own"] for each in found], found[0]["of all"]
    assert math.isclose(sum(owns), total, rel_tol=1e-12) and found[1]["of all"] == total
    assert all((own > 0) is bool(part) for own, part in zip(owns, case.rollouts, strict=True))


@pytest.mark.slow
def test_counts_of_one_rank_alone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a statistic of the batch takes this rank's counts."""
    monkeypatch.setattr(Routing, "gather", lambda self, ranks: None)
    found = run_ranks(2, compared, Routed(wrap=replicated))
    assert any("routers of rank" in fault for fault in faults(found)), found


def refused(router: RouterLoss, kind: str) -> list[str]:
    """Messages of the errors that a call on ranks ends with, on this rank."""
    policy = on_ranks(replicated(mixture()), DEEP)
    batch = RolloutBatch(UNEQUAL[dist.get_rank()])
    counts = None
    loss: Any = GRPO()
    if kind == "counts":
        counts = policy.score(batch, router=router).expert_counts
        assert counts is not None
        counts = counts.clone()
        counts[0, 0] -= dist.get_rank()
        counts[0, 1] += dist.get_rank()
    if kind == "function":
        loss = FunctionLoss(lambda outputs, batch: outputs.logprobs.sum(), decomposition="token")
    said = []
    for _ in range(2):
        try:
            policy.forward_backward(batch, loss, router=router, router_counts=counts)
        except forkpoint.errors.ForkpointError as error:
            said.append(f"{type(error).__name__}: {error}")
    assert all(p.grad is None for p in policy.host.model.parameters())
    return said


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("counts", "ConfigError: router_counts of ranks 0 and 1 differ"),
        ("function", "UnsupportedError: router= was given with a loss that is a function"),
    ],
)
def test_what_is_refused_on_ranks(kind: str, text: str) -> None:
    for said in run_ranks(2, refused, RouterLoss(**COEFFICIENTS), kind):
        assert len(said) == 2 and all(each.startswith(text) for each in said), said


def updated(steps: int) -> list[torch.Tensor]:
    """Biases after updates on ranks, and in one process."""
    rank = dist.get_rank()
    model, other = biased(), biased()
    with lifted_upcasts(model), lifted_upcasts(other):
        policy, alone = on_ranks(sharded(model), DEEP), forkpoint.wrap(other, DEEP)
        for number in range(steps):
            parts = UNEQUAL if number % 2 else EMPTY
            stats: Any = policy.forward_backward(
                RolloutBatch(parts[rank]), GRPO(), expert_counts=True
            )
            assert stats.router_loss is None
            policy.update_router_biases(stats.expert_counts, rate=0.05)
            every = RolloutBatch([r for part in parts for r in part])
            wanted: Any = alone.forward_backward(every, GRPO(), expert_counts=True)
            assert torch.equal(stats.expert_counts, wanted.expert_counts)
            alone.update_router_biases(wanted.expert_counts, rate=0.05)
    return [
        bias
        for module in (model, other)
        for name, bias in module.named_buffers()
        if "e_score_correction_bias" in name
    ]


@pytest.mark.slow
def test_biases_take_the_counts_of_all_ranks() -> None:
    skip_without_router_logits("glm4_moe")
    first, second = run_ranks(2, updated, 4)
    assert len(first) == 4 and float(first[0].abs().max()) > 0
    for bias, other in zip(first, second, strict=True):
        assert torch.equal(bias, other)
    for bias, wanted in zip(first[:2], first[2:], strict=True):
        assert torch.equal(bias, wanted)
