"""Router losses and counts of experts of models that transformers splits over ranks."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from scenarios_of_ranks import DEEP, EMPTY, UNEQUAL, group, own_loss, said
from split_models import MOE, Split, data_rank, load
from test_router_ranks import COEFFICIENTS, Routed, apart, beside_one_process, faults, routers
from test_split_models import LATENT, checkpointed

import forkpoint
from forkpoint import RolloutBatch
from forkpoint.engine.changes import Changes
from forkpoint.hosts.transformers.routers import Routers
from forkpoint.hosts.transformers.stock import run_plain_recurrences
from forkpoint.losses import GRPO, RouterLoss
from forkpoint.testing import lifted_upcasts
from versions import needs_splits

pytestmark = needs_splits
TP2 = {"tp_size": 2}
TP2_EP2 = {"tp_size": 2, "ep_size": 2}
FSDP2_EP2 = {"fsdp_size": 2, "ep_size": 2}
TP2_FSDP2_EP4 = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}
FSDP4_EP4 = {"fsdp_size": 4, "ep_size": 4}
FOUR = (*UNEQUAL, group(7, 3, 11, 6), [])
DELTA = {
    **MOE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 16,
}
COPY = (UNEQUAL[0],)
"""One data rank."""


def mixture(options: dict[str, Any], **other: Any) -> Split:
    rollouts = UNEQUAL if "fsdp_size" in options else COPY
    given: dict[str, Any] = {"family": "qwen3_moe", "sizes": MOE, "rollouts": rollouts, **other}
    return Split(options=options, **given)


@dataclass(frozen=True)
class Case:
    """A step with a router loss on split ranks, and in one process."""

    split: Split
    scope: Any = "batch"
    given: bool = False
    last_token: bool = True
    of_a_function: bool = False
    """Whether the loss is a function, which couples all tokens."""

    @property
    def routed(self) -> Routed:
        split = self.split
        return Routed(rollouts=split.rollouts, scope=self.scope, last_token=self.last_token)


def compared(folder: Path, case: Case) -> dict[str, float]:
    """Differences of a step on this rank from one process."""
    split, place = case.split, data_rank(case.split)
    model, other = load(folder, split, **split.options), load(folder, split)
    router_losses = routers(case.routed, place)
    with Changes() as changes:
        for each in (model, other):
            run_plain_recurrences(each, changes)
        policies = forkpoint.wrap(model, split.config), forkpoint.wrap(other, split.config)
        loss = own_loss if case.of_a_function else split.loss
        rollouts, given = split.rollouts, case.given
        _, _, found = beside_one_process(
            policies, rollouts, place, router_losses, loss, given=given
        )
    gates = [f"{router.name}.weight" for router in Routers(other, other).found]
    return {**found, **apart(model, other, gates)}


CASES: dict[str, tuple[int, Case]] = {
    "tensor": (2, Case(mixture(TP2))),
    "tensor, rollout, checkpointed": (2, Case(mixture(TP2, alone=checkpointed), scope="rollout")),
    "tensor, lists, without last tokens": (
        2,
        Case(mixture(TP2), scope="lists", given=True, last_token=False),
    ),
    "tensor, Qwen3-Next": (2, Case(mixture(TP2, family="qwen3_next", sizes=DELTA))),
    "tensor and expert": (2, Case(mixture(TP2_EP2))),
    "tensor and expert, recomputed": (
        2,
        Case(mixture(TP2_EP2, config=replace(DEEP, activations="recompute"))),
    ),
    "tensor and expert, a function": (2, Case(mixture(TP2_EP2), of_a_function=True)),
    "data and expert": (2, Case(mixture(FSDP2_EP2))),
    "data and expert, rollout": (2, Case(mixture(FSDP2_EP2), scope="rollout", last_token=False)),
    "data and expert, a rank without": (2, Case(mixture(FSDP2_EP2, rollouts=EMPTY))),
    "tensor x data x expert": (4, Case(mixture(TP2_FSDP2_EP4))),
    "tensor x data x expert, a data rank without": (
        4,
        Case(mixture(TP2_FSDP2_EP4, rollouts=EMPTY), scope="rollout", last_token=False),
    ),
    "data x expert": (4, Case(mixture(FSDP4_EP4, rollouts=FOUR))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_router_losses_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    size, case = CASES[name]
    found = run_ranks(size, compared, case.split.save(tmp_path), case)
    assert not faults(found), found


# Biases, and what is refused
# ------------------------------------------------------------


def updated(folder: Path, split: Split, steps: int) -> list[torch.Tensor]:
    """Biases after updates on ranks, and in one process."""
    place = data_rank(split)
    model, other = load(folder, split, **split.options), load(folder, split)
    with lifted_upcasts(model), lifted_upcasts(other):
        policy, alone = forkpoint.wrap(model, split.config), forkpoint.wrap(other, split.config)
        for _ in range(steps):
            own = RolloutBatch(split.rollouts[place])
            stats: Any = policy.forward_backward(own, split.loss, expert_counts=True)
            policy.update_router_biases(stats.expert_counts, rate=0.05)
            every = RolloutBatch([r for part in split.rollouts for r in part])
            wanted: Any = alone.forward_backward(every, split.loss, expert_counts=True)
            assert torch.equal(stats.expert_counts, wanted.expert_counts)
            if len(split.rollouts) == 1:
                assert torch.equal(stats.computed_expert_counts, wanted.computed_expert_counts)
            alone.update_router_biases(wanted.expert_counts, rate=0.05)
    return [
        bias
        for module in (model, other)
        for name, bias in module.named_buffers()
        if "e_score_correction_bias" in name
    ]


@pytest.mark.slow
@pytest.mark.parametrize("options", [TP2_EP2, FSDP2_EP2, TP2], ids=str)
def test_biases_take_the_counts_of_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    split = mixture(options, family="deepseek_v3", sizes=LATENT)
    first, second = run_ranks(2, updated, split.save(tmp_path), split, 4)
    half = len(first) // 2
    assert half > 0 and float(first[0].abs().max()) > 0
    for bias, other in zip(first, second, strict=True):
        assert torch.equal(bias, other)
    for bias, wanted in zip(first[:half], first[half:], strict=True):
        assert torch.equal(bias, wanted)


def refused_of_one_copy(folder: Path, split: Split) -> list[str]:
    policy = forkpoint.wrap(load(folder, split, **split.options), split.config)
    batch, rank = RolloutBatch(split.rollouts[0]), dist.get_rank()
    router = RouterLoss(scope="rollout", **COEFFICIENTS)
    counts = policy.score(batch, router=router).rollout_expert_counts
    assert counts is not None
    counts[0, 0, :2] += torch.tensor([-rank, rank])
    count = len(batch)
    lists = RouterLoss(scope=[[rank], [n for n in range(count) if n != rank]], **COEFFICIENTS)
    calls = (
        lambda: policy.forward_backward(batch, GRPO(), router=router, router_counts=counts),
        lambda: policy.forward_backward(batch, GRPO(), router=lists),
        lambda: policy.score(batch, router=lists),
    )
    found = [said(call) for call in calls]
    assert all(p.grad is None for p in policy.host.model.parameters())
    policy.forward_backward(batch, GRPO(), router=router)
    return found


@pytest.mark.slow
def test_ranks_of_one_copy_take_the_same_statistics(tmp_path: Path) -> None:
    split = mixture(TP2_EP2)
    for counts, *scopes in run_ranks(2, refused_of_one_copy, split.save(tmp_path), split):
        text = "ConfigError: ranks 0 and 1 hold one copy of the model together"
        assert counts.startswith(text) and "different router_counts" in counts
        for scope in scopes:
            assert scope.startswith(text) and "different lists of rollouts" in scope
