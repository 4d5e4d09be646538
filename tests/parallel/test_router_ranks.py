"""Router losses and counts of experts on ranks, beside one process with all rollouts."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases_of_ranks import LATENT, MIXTURE, Case, both, error_of, named, on_ranks_of, over_replicas
from processes import run_ranks
from scenarios_of_ranks import (
    BAR,
    DEEP,
    EMPTY,
    UNEQUAL,
    group,
    on_ranks,
    own_loss,
    replicated,
    routed,
    said,
)
from test_ranks import checkpointed

from forkpoint import Config, RolloutBatch
from forkpoint.losses import GRPO, GSPO, FunctionLoss, RouterLoss
from versions import needs_splits, skip_without_router_logits

COEFFICIENTS: dict[str, Any] = {"load_balancing": 0.7, "z": 0.05}
TP2, TP2_EP2 = {"tp_size": 2}, {"tp_size": 2, "ep_size": 2}
FSDP2_EP2 = {"fsdp_size": 2, "ep_size": 2}
TP2_FSDP2_EP4 = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}
FOUR = (*UNEQUAL, group(7, 3, 11, 6), [])
FIRST_EMPTY = (EMPTY[1], [])
RECOMPUTED = replace(DEEP, activations="recompute")


def mixture(**changes: Any) -> Case:
    """Of data ranks, unless others are said."""
    given: dict[str, Any] = {"family": "qwen3_moe", "sizes": MIXTURE, "rollouts": UNEQUAL}
    return Case(**{**given, **changes})


def mixture_of_one(**changes: Any) -> Case:
    return mixture(**{"rollouts": UNEQUAL[:1], **changes})


def staged(**changes: Any) -> Case:
    sizes = {**MIXTURE, "num_hidden_layers": 4, **changes.pop("sizes", {})}
    return mixture_of_one(**{"pp": 2, "sizes": sizes, **changes})


@dataclass(frozen=True)
class Routed:
    """A step with a router loss, on ranks and in one process."""

    case: Case = field(default_factory=mixture)
    scope: Any = "batch"
    """Or "lists": of each rank's rollouts, the first, and the others."""
    given: bool = False
    """Whether the step is given the counts of a pass of scores."""
    last_token: bool = True

    def routers(self, place: int) -> tuple[RouterLoss, RouterLoss]:
        """That of the data rank at a place, and that of one process."""
        scopes = [self.scope, self.scope]
        if self.scope == "lists":
            counts = [len(part) for part in self.case.rollouts]
            firsts = np.cumsum([0, *counts]).tolist()
            every = [_lists_of(count, first) for count, first in zip(counts, firsts, strict=False)]
            scopes = [_lists_of(counts[place]), [part for parts in every for part in parts]]
        own, whole = (
            RouterLoss(scope=scope, last_token=self.last_token, **COEFFICIENTS) for scope in scopes
        )
        return own, whole


def _lists_of(count: int, first: int = 0) -> list[list[int]]:
    parts = [[first], list(range(first + 1, first + count))]
    return [part for part in parts if part] if count else []


def compared(folder: Path, case: Case, routed: Routed) -> dict[str, Any]:
    """Differences of a step on this rank from one process, and what else it says."""
    with both(folder, case) as (policy, alone, place):
        batch = RolloutBatch(case.rollouts[place])
        every = RolloutBatch([r for part in case.rollouts for r in part])
        own, whole = routed.routers(place)
        scored: Any = policy.score(batch, router=own)
        value: Any = alone.score(every, router=whole)
        counts = scored.expert_counts if own.scope == "batch" else scored.rollout_expert_counts
        counts = counts if routed.given else None
        stats: Any = policy.forward_backward(batch, case.loss, router=own, router_counts=counts)
        wanted: Any = alone.forward_backward(every, case.loss, router=whole)
    begin = sum(len(part) for part in case.rollouts[:place])
    here = value.rollout_expert_counts[begin : begin + len(batch)]
    assert stats.router_loss and wanted.router_loss and value.router_loss
    return {
        "differences": {
            "loss": abs(stats.loss - wanted.loss),
            "router loss": abs(stats.router_loss - wanted.router_loss),
            "scored": abs(scored.router_loss - value.router_loss),
            "counts": float(not torch.equal(stats.expert_counts, value.expert_counts)),
            "own counts": float(not torch.equal(stats.rollout_expert_counts, here)),
            "gradients": error_of(policy.host.model, alone.host.model),
            "routers": error_of(policy.host.model, alone.host.model, "mlp.gate."),
        },
        "own": scored.own_router_loss,
        "of all": scored.router_loss,
        "computed": int(stats.computed_expert_counts.sum()),
        "passes": sum(event.startswith("score") for event in stats.events),
    }


WITHIN = Config(sharing="tree", boundary="within")
ONCE = replace(DEEP, gather="step")
DATA: dict[str, Routed] = {
    "batch": Routed(),
    "batch, counts given": Routed(given=True),
    "rollout": Routed(scope="rollout"),
    "one microbatch each": Routed(mixture(config=WITHIN)),
    "without last tokens": Routed(last_token=False, scope="rollout", given=True),
    "a coupling loss": Routed(mixture(loss=GSPO())),
    "a rank without rollouts": Routed(mixture(rollouts=EMPTY)),
    "the last without": Routed(mixture(rollouts=FIRST_EMPTY), scope="rollout"),
    "gathered once, a rank without": Routed(mixture(config=ONCE, rollouts=EMPTY)),
    "gathered once": Routed(mixture(config=ONCE), scope="lists", given=True),
    "DDP": Routed(mixture(hold=over_replicas)),
    "DDP, counts given": Routed(mixture(hold=over_replicas), given=True, last_token=False),
    "DDP, a rank without": Routed(mixture(hold=over_replicas, rollouts=EMPTY)),
    "DDP, lists, a coupling loss": Routed(
        mixture(hold=over_replicas, loss=GSPO(), rollouts=FIRST_EMPTY), scope="lists"
    ),
}
CASES: dict[str, Routed] = {
    **DATA,
    "tensor, rollout, checkpointed": Routed(
        mixture_of_one(options=TP2, alone=checkpointed), scope="rollout"
    ),
    "tensor, lists, without last tokens": Routed(
        mixture_of_one(options=TP2), scope="lists", given=True, last_token=False
    ),
    "tensor and expert, recomputed": Routed(mixture_of_one(options=TP2_EP2, config=RECOMPUTED)),
    "tensor and expert, a function": Routed(mixture_of_one(options=TP2_EP2, loss=own_loss)),
    "data and expert": Routed(mixture(options=FSDP2_EP2)),
    "data and expert, rollout": Routed(
        mixture(options=FSDP2_EP2), scope="rollout", last_token=False
    ),
    "tensor x data x expert": Routed(mixture(options=TP2_FSDP2_EP4)),
    "tensor x data x expert, a data rank without": Routed(
        mixture(options=TP2_FSDP2_EP4, rollouts=EMPTY), scope="rollout", last_token=False
    ),
    "data x expert": Routed(mixture(options={"fsdp_size": 4, "ep_size": 4}, rollouts=FOUR)),
    "context, recomputed": Routed(mixture_of_one(cp=2, config=RECOMPUTED)),
    "context, rollout, checkpointed": Routed(
        mixture_of_one(cp=2, alone=checkpointed), scope="rollout"
    ),
    "context, counts given": Routed(mixture_of_one(cp=2), given=True),
    "context, data": Routed(mixture(cp=2)),
    "context and experts, data": Routed(
        mixture(options={"fsdp_size": 4, "ep_size": 2}, mesh={"dp": 2, "cp": 2})
    ),
    "stages, lists, a coupling loss": Routed(staged(loss=GSPO()), scope="lists"),
    "stages, counts of rollouts given": Routed(
        staged(), given=True, scope="rollout", last_token=False
    ),
    "four stages": Routed(staged(pp=4)),
    "stages, recomputed": Routed(staged(config=RECOMPUTED)),
    "stages, checkpointed": Routed(staged(config=replace(DEEP, checkpointing="full"))),
    "stages of context": Routed(staged(cp=2), scope="rollout"),
    "stages of data, a rank without rollouts": Routed(staged(rollouts=EMPTY), scope="rollout"),
    "stages of experts": Routed(staged(tp=2, ep=2)),
    "a stage without routers": Routed(staged(sizes={"mlp_only_layers": [0, 1]})),
}


@named(CASES, "batch", case=lambda routed: routed.case)
def test_router_losses_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    routed, case = CASES[name], CASES[name].case
    found = on_ranks_of(case, tmp_path, compared, routed)
    for each in found:
        assert max(each["differences"].values()) < BAR, found
    if name not in DATA:
        return
    if routed.scope == "batch" and not routed.given:
        assert any(each["passes"] for each in found)
    if routed.given and not isinstance(case.loss, GSPO):
        assert not any(each["passes"] for each in found)
    assert found[0]["computed"] == found[1]["computed"]
    owns, total = [each["own"] for each in found], found[0]["of all"]
    assert math.isclose(sum(owns), total, rel_tol=1e-12) and found[1]["of all"] == total
    assert all((own > 0) is bool(part) for own, part in zip(owns, case.rollouts, strict=True))


# Biases
# ------------------------------------------------------------


def updated(folder: Path, case: Case) -> tuple[int, float, float]:
    """How many biases this rank has after updates, their size, and how far they are from those of
    one process."""
    with both(folder, case) as (policy, alone, place):
        for number in range(4):
            parts = case.rollouts if number % 2 or len(case.rollouts) == 1 else EMPTY
            own, every = RolloutBatch(parts[place]), RolloutBatch([r for p in parts for r in p])
            stats: Any = policy.forward_backward(own, GRPO(), expert_counts=True)
            wanted: Any = alone.forward_backward(every, GRPO(), expert_counts=True)
            assert torch.equal(stats.expert_counts, wanted.expert_counts)
            if len(parts) == 1:
                assert torch.equal(stats.computed_expert_counts, wanted.computed_expert_counts)
            for each, result in ((policy, stats), (alone, wanted)):
                each.update_router_biases(result.expert_counts, rate=0.05)
    true = dict(alone.host.model.named_buffers())
    buffers = policy.host.model.named_buffers()
    found = {n: b for n, b in buffers if "e_score_correction_bias" in n}
    apart = max(float((b - true[n]).abs().max()) for n, b in found.items())
    return len(found), min(float(b.abs().max()) for b in found.values()), apart


BIASED = {
    "data": Case(family="deepseek_v3", sizes=LATENT, rollouts=UNEQUAL),
    "tensor and expert": Case(family="deepseek_v3", sizes=LATENT, options=TP2_EP2),
    "data and expert": Case(
        family="deepseek_v3", sizes=LATENT, options=FSDP2_EP2, rollouts=UNEQUAL
    ),
    "stages": Case(family="deepseek_v3", sizes={**LATENT, "num_hidden_layers": 4}, pp=2),
}


@needs_splits
@pytest.mark.slow
@pytest.mark.parametrize("name", BIASED)
def test_biases_take_the_counts_of_all_ranks(name: str, tmp_path: Path) -> None:
    skip_without_router_logits("deepseek_v3")
    found = on_ranks_of(BIASED[name], tmp_path, updated)
    assert all(size > 0 and apart == 0 for _, size, apart in found)
    assert sum(count for count, *_ in found) == (3 if name == "stages" else 4)


# What is refused
# ------------------------------------------------------------


def refused(router: RouterLoss, kind: str) -> list[str]:
    """Messages of the errors that a call on ranks ends with, on this rank."""
    policy = on_ranks(replicated(mixture().made()), DEEP)
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
    step = lambda: policy.forward_backward(batch, loss, router=router, router_counts=counts)  # noqa: E731
    found = [said(step), said(step)]
    assert all(p.grad is None for p in policy.host.model.parameters())
    return found


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("counts", "ConfigError: router_counts of ranks 0 and 1 differ"),
        ("function", "UnsupportedError: router= was given with a loss that is a function"),
    ],
)
def test_what_is_refused_on_ranks(kind: str, text: str) -> None:
    for found in run_ranks(2, refused, RouterLoss(**COEFFICIENTS), kind):
        assert all(each.startswith(text) for each in found), found


def refused_of_one_copy(folder: Path, case: Case) -> list[str]:
    with both(folder, case) as (policy, _, _):
        batch, rank = RolloutBatch(case.rollouts[0]), dist.get_rank()
        router = RouterLoss(scope="rollout", **COEFFICIENTS)
        counts = policy.score(batch, router=router).rollout_expert_counts
        assert counts is not None
        counts[0, 0, :2] += torch.tensor([-rank, rank])
        others = [n for n in range(len(batch)) if n != rank]
        lists = RouterLoss(scope=[[rank], others], **COEFFICIENTS)
        calls = (
            lambda: policy.forward_backward(batch, GRPO(), router=router, router_counts=counts),
            lambda: policy.forward_backward(batch, GRPO(), router=lists),
            lambda: policy.score(batch, router=lists),
        )
        found = [said(call) for call in calls]
        assert all(p.grad is None for p in policy.host.model.parameters())
        policy.forward_backward(batch, GRPO(), router=router)
    return found


@needs_splits
@pytest.mark.slow
def test_ranks_of_one_copy_take_the_same_statistics(tmp_path: Path) -> None:
    case = mixture_of_one(options=TP2_EP2)
    for counts, *scopes in on_ranks_of(case, tmp_path, refused_of_one_copy):
        text = "ConfigError: ranks 0 and 1 hold one copy of the model"
        assert counts.startswith(text) and "different router_counts" in counts
        for scope in scopes:
            assert scope.startswith(text) and "different lists of rollouts" in scope


# Experts that are given
# ------------------------------------------------------------


def replayed(folder: Path, case: Case) -> dict[str, float]:
    with both(folder, case) as (policy, alone, _):
        batch = RolloutBatch(case.rollouts[0])
        stats: Any = policy.forward_backward(batch, case.loss)
        wanted: Any = alone.forward_backward(batch, case.loss)
    routes, true = stats.routes, wanted.routes
    assert len(set(true.elsewhere_L.tolist())) > 1  # layers differ
    return {
        "error": error_of(policy.host.model, alone.host.model),
        "decisions": float((routes.decisions_L - true.decisions_L).abs().sum()),
        "elsewhere": float((routes.elsewhere_L - true.elsewhere_L).abs().sum()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2])
def test_replayed_experts_are_those_of_one_process(cp: int, tmp_path: Path) -> None:
    case = staged(cp=cp, rollouts=(routed(UNEQUAL[0], 4),))
    for found in on_ranks_of(case, tmp_path, replayed):
        assert max(found.values()) < BAR, found
