"""Prompts of which several ranks have rollouts: run by one rank, and exchanged."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from scenarios_of_ranks import (
    BAR,
    OfAllRanks,
    Scenario,
    compared,
    distance,
    gradients,
    group,
    in_hybrid_mesh,
    model_of,
    on_ranks,
    replicated,
    sharded,
    tree,
)
from test_ranks import checkpointed, critic, frozen_but, gated_linear_attention, lora, mamba, valued
from torch import Tensor, nn

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.errors import RankError
from forkpoint.losses import GRPO, GSPO, ValueLoss
from forkpoint.plan.pricing import meters
from forkpoint.testing import ReadOnlyHook, tiny_model
from lanes import slow_besides
from watched import watched

MIXED = Config(sharing="tree", boundary="mixed", max_microbatch_tokens=48, split="exchange")


def dealt(groups: list[list[Rollout]], ranks: int) -> tuple[list[Rollout], ...]:
    """Each group's rollouts dealt out to all ranks, as trainers do that know nothing of groups."""
    return tuple([r for g in groups for r in g[rank::ranks]] for rank in range(ranks))


# The last prompt is longer than a microbatch, and its trunk a chain of two.
TWO = dealt([group(0, 5, 20, 8), group(1, 4, 31, 9), group(4, 2, 70, 6)], 2)
# Each rank has something of its own besides, of another depth.
UNLIKE = ([*TWO[0], *tree(3, 4)], [*TWO[1], *group(7, 3, 12, 9)])
# Rank 1 owns the one prompt that both have, and rank 0 runs nothing before it is exchanged.
ONE_OWNER = (UNLIKE[0], [*TWO[1][:2], *group(7, 3, 12, 9)])


def windowed() -> nn.Module:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {"sliding_window": 9, "layer_types": kinds}
    return tiny_model("qwen3", dtype=torch.float64, use_sliding_window=True, **sizes)


def of(**options: Any) -> Scenario:
    given: dict[str, Any] = {"config": MIXED, "rollouts": UNLIKE, **options}
    return Scenario(**given)


SCENARIOS = {
    "fully_shard": of(),
    "two passes": of(loss=GSPO()),
    "a loss of all ranks": of(loss=OfAllRanks()),
    "recomputed": of(config=replace(MIXED, activations="recompute")),
    "offloaded": of(config=replace(MIXED, activations="offload")),
    "checkpointed": of(alone=checkpointed),
    "accumulated": of(steps=2),
    "LoRA": of(make=lora),
    "first layer alone": of(alone=frozen_but(0)),
    "a critic": of(make=critic, loss=ValueLoss(), rollouts=tuple(map(valued, UNLIKE))),
    "gated linear attention": of(make=gated_linear_attention),
    "Mamba-2": of(make=mamba),
    "windows": of(make=windowed),
    "DistributedDataParallel": of(wrap=replicated),
    "DistributedDataParallel, Mamba-2": of(wrap=replicated, make=mamba),
}
CASES = [
    (name, gather)
    for name in SCENARIOS
    for gather in (("",) if name.startswith("Distributed") else ("microbatch", "step"))
]
IN_CORE = (("DistributedDataParallel, Mamba-2", ""),)


def computed(scenario: Scenario) -> dict[str, Any]:
    """As `compared`, with the tokens that all ranks run."""
    found = compared(scenario)
    total = torch.tensor(found["computed"])
    dist.all_reduce(total)
    return {**found, "all ranks run": int(total)}


def check(ranks: list[dict[str, Any]], gather: str, scores: bool = False) -> None:
    for rank in ranks:
        assert rank["error"] < BAR and rank["loss"] < BAR, rank
        assert rank["split"] == "exchange" and rank["gather"] == gather
        assert rank["exchanges"] == 2 + scores, rank


@pytest.mark.parametrize(("name", "gather"), slow_besides(IN_CORE, CASES))
def test_gradients_are_those_of_one_process(name: str, gather: Any) -> None:
    scenario = replace(SCENARIOS[name], gather=gather or "auto")
    ranks = run_ranks(2, computed, scenario)
    check(ranks, gather, "two passes" in name or "all ranks" in name)
    # Every token that is not trained runs on one rank alone, as in one process.
    assert ranks[0]["all ranks run"] == ranks[0]["unique"]


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["microbatch", "step"])
def test_four_ranks_of_a_hybrid_mesh(gather: Any) -> None:
    """Of which one has no rollouts, and one none of the prompts that others share."""
    three = dealt([group(0, 5, 20, 8), group(1, 2, 31, 9), group(2, 3, 70, 6)], 2)
    rollouts = (*three, [], group(7, 4, 11, 6))
    scenario = Scenario(wrap=in_hybrid_mesh, rollouts=rollouts, config=MIXED, gather=gather)
    check(run_ranks(4, compared, scenario), gather)


# Failures
# ------------------------------------------------------------


@dataclass(frozen=True)
class Fails(GRPO):
    """Raises on one rank."""

    rank: int = -1

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        if dist.get_rank() == self.rank:
            raise ValueError("of the test")
        return super().__call__(outputs, batch)

    def __repr__(self) -> str:
        return "Fails()"


# In a step of ONE_OWNER.
VICTIMS = {"before": 1, "between": 0, "loss": 0}


def failed_and_repeated(wrap: Any, gather: Any, moment: str) -> tuple[str, float]:
    """A rank fails at a moment of a step: its error here, and how far the next step is off."""
    model = model_of(of())
    events: list[str] = []
    rank = VICTIMS[moment]

    def hook(*_: Any) -> None:
        exchanged = "share prompts" in events
        if moment != "loss" and failing and exchanged == (moment == "between"):
            raise MemoryError("of the test")

    failing = False
    model.model.layers[1].register_forward_pre_hook(ReadOnlyHook(hook))  # type: ignore[operator, union-attr]
    policy = on_ranks(wrap(model), replace(MIXED, self_check=False), gather)
    own = RolloutBatch(ONE_OWNER[dist.get_rank()])
    first = policy.forward_backward(own, GRPO())
    assert first.plan.split == "exchange"
    assert first.events[0].startswith("forward prefix") == (dist.get_rank() == 1)
    model.zero_grad()
    failing, found = dist.get_rank() == rank, ""
    try:
        with watched(events.append):
            policy.forward_backward(own, Fails(rank=rank if moment == "loss" else -1))
    except (MemoryError, ValueError, RankError) as error:
        found = f"{type(error).__name__}: {error}"
    assert all(parameter.grad is None for parameter in model.parameters())
    failing = False
    policy.forward_backward(own, GRPO())
    alone = forkpoint.wrap(model_of(of()))
    alone.forward_backward(RolloutBatch([r for part in ONE_OWNER for r in part]), GRPO())
    names = [name for name, _ in alone.host.model.named_parameters()]
    return found, distance(gradients(model), gradients(alone.host.model), names)


@pytest.mark.parametrize(
    ("wrap", "gather", "moment"),
    slow_besides(
        [(replicated, "auto", "between")],
        [
            (wrap, gather, moment)
            for wrap, gather in ((replicated, "auto"), (sharded, "step"))
            for moment in ("before", "between", "loss")
        ]
        + [(sharded, "microbatch", "loss")],
    ),
)
def test_a_rank_that_fails_ends_the_step_on_all(
    quick: None, wrap: Any, gather: Any, moment: str
) -> None:
    found = run_ranks(2, failed_and_repeated, wrap, gather, moment)
    victim = VICTIMS[moment]
    kind = "ValueError" if moment == "loss" else "MemoryError"
    assert found[victim][0] == f"{kind}: of the test"
    assert f"rank {victim} failed in this step" in found[1 - victim][0]
    assert "of the test" in found[1 - victim][0]
    assert max(error for _, error in found) < 1e-7, found  # norms are in float32


# What is chosen
# ------------------------------------------------------------


def chosen(configs: list[Config], wrap: Any, rollouts: Any, loss: Any) -> list[tuple[str, str]]:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        # The host's time of a microbatch would decide everything for so small a model.
        patch.setattr(meters, "HOST_BLOCK_MS", 0.0)
        for config in configs:
            policy = forkpoint.wrap(wrap(model_of(of())), replace(config, self_check=False))
            plan = policy.forward_backward(RolloutBatch(rollouts[dist.get_rank()]), loss).plan
            assert plan.explain()
            found.append((plan.split, plan.split_reason))
    return found


def test_what_ranks_choose() -> None:
    # Enough for what ranks run one after the other, and not for every prompt at once.
    tight = replace(MIXED, memory_budget=870_000, activations="keep", checkpointing="none")
    configs = [
        MIXED,
        replace(MIXED, split="auto"),
        replace(MIXED, split="replicate"),
        replace(MIXED, split="auto", boundary="across"),
        tight,
    ]
    one, two = run_ranks(2, chosen, configs, replicated, TWO, GRPO())
    assert one == two
    assert one[0] == ("exchange", "as asked")
    # Prefix caches of a tiny model are large beside its weights, and so is the link's price.
    assert one[1][0] == "replicate" and "faster than exchanging prompts" in one[1][1]
    assert one[2] == one[3] == ("", "")
    assert one[4][0] == "replicate" and "cannot exchange prompts" in one[4][1]
