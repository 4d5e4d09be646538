"""Losses of routers that lie on several stages of a pipeline are those of one process."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from processes import run_ranks
from scenarios_of_ranks import BAR, DEEP, EMPTY, UNEQUAL, routed
from split_models import MOE, Split, load
from test_router_ranks import Routed, beside_one_process, routers
from test_split_models import LATENT
from test_split_stages import Case, error_of, held, meshes_of, of, split_model

import forkpoint
from forkpoint import RolloutBatch
from forkpoint.losses import GRPO, GSPO, RouterLoss
from forkpoint.testing import lifted_upcasts
from versions import needs_splits, skip_without_router_logits

MIXTURE = of(Split(family="qwen3_moe", sizes=MOE))


@dataclass(frozen=True)
class Balanced:
    case: Case = field(default_factory=lambda: Case(MIXTURE))
    scope: Any = "batch"
    given: bool = False
    last_token: bool = True

    def own(self, place: int) -> tuple[RouterLoss, RouterLoss]:
        case = Routed(
            rollouts=self.case.split.rollouts, scope=self.scope, last_token=self.last_token
        )
        return routers(case, place)


def compared(folder: Path, balanced: Balanced) -> dict[str, float]:
    case, split, meshes = balanced.case, balanced.case.split, meshes_of(balanced.case)
    model, other = split_model(folder, case, meshes), load(folder, split)
    place = meshes.dense.get_local_rank("dp")
    policies = (
        forkpoint.wrap(held(model, case, meshes), split.config, mesh=meshes.dense),
        forkpoint.wrap(other, split.config),
    )
    own, given = balanced.own(place), balanced.given
    _, _, found = beside_one_process(policies, split.rollouts, place, own, split.loss, given=given)
    errors = {"error": error_of(model, other), "routers": error_of(model, other, "mlp.gate.")}
    return {**found, **errors}


BALANCED: dict[str, Balanced] = {
    "batch": Balanced(),
    "rollout": Balanced(scope="rollout"),
    "lists, a coupling loss": Balanced(Case(replace(MIXTURE, loss=GSPO())), scope="lists"),
    "counts given": Balanced(given=True),
    "counts of rollouts given": Balanced(given=True, scope="rollout", last_token=False),
    "four stages": Balanced(Case(MIXTURE, pp=4)),
    "recomputed": Balanced(Case(replace(MIXTURE, config=replace(DEEP, activations="recompute")))),
    "checkpointed": Balanced(Case(replace(MIXTURE, config=replace(DEEP, checkpointing="full")))),
    "context": Balanced(Case(MIXTURE, cp=2)),
    "context, rollout": Balanced(Case(MIXTURE, cp=2), scope="rollout"),
    "data": Balanced(Case(replace(MIXTURE, rollouts=UNEQUAL), dp=2)),
    "data, a rank without rollouts": Balanced(
        Case(replace(MIXTURE, rollouts=EMPTY), dp=2), scope="rollout"
    ),
    "experts": Balanced(Case(MIXTURE, tp=2, ep=2)),
}


@pytest.mark.slow
@needs_splits
@pytest.mark.parametrize("name", BALANCED)
def test_router_losses_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    case = BALANCED[name].case
    for found in run_ranks(case.size, compared, case.split.save(tmp_path), BALANCED[name]):
        assert max(found.values()) < BAR, found


def updated(folder: Path, split: Split) -> tuple[int, float]:
    """How many biases this stage has after updates, and how far they are from one process's."""
    meshes = meshes_of(Case(split))
    model, other = load(folder, split), load(folder, split)
    batch = RolloutBatch(split.rollouts[0])
    with lifted_upcasts(model), lifted_upcasts(other):
        policy = forkpoint.wrap(model, split.config, mesh=meshes.dense)
        alone = forkpoint.wrap(other, split.config)
        for each in (policy, alone) * 2:
            stats: Any = each.forward_backward(batch, GRPO(), expert_counts=True)
            each.update_router_biases(stats.expert_counts, rate=0.05)
    wanted = dict(other.named_buffers())
    found = {n: b for n, b in model.named_buffers() if "e_score_correction_bias" in n}
    assert all(float(bias.abs().max()) > 0 for bias in found.values())
    return len(found), max(float((b - wanted[n]).abs().max()) for n, b in found.items())


@needs_splits
@pytest.mark.slow
def test_biases_take_the_counts_of_their_own_layers(tmp_path: Path) -> None:
    skip_without_router_logits("deepseek_v3")
    split = Split(family="deepseek_v3", sizes={**LATENT, "num_hidden_layers": 4})
    found = run_ranks(2, updated, split.save(tmp_path), split)
    assert sum(count for count, _ in found) == 3 and all(apart == 0 for _, apart in found)


@needs_splits
@pytest.mark.slow
def test_a_stage_without_routers(tmp_path: Path) -> None:
    split = Split(
        family="qwen3_moe", sizes={**MOE, "num_hidden_layers": 4, "mlp_only_layers": [0, 1]}
    )
    balanced = Balanced(Case(split))
    for found in run_ranks(2, compared, split.save(tmp_path), balanced):
        assert max(found.values()) < BAR, found


# Replayed experts
# ------------------------------------------------------------


def replayed(folder: Path, case: Case) -> dict[str, float]:
    split, meshes = case.split, meshes_of(case)
    model, other = split_model(folder, case, meshes), load(folder, split)
    batch = RolloutBatch(split.rollouts[0])
    with lifted_upcasts(model), lifted_upcasts(other):
        policy = forkpoint.wrap(held(model, case, meshes), split.config, mesh=meshes.dense)
        alone = forkpoint.wrap(other, split.config)
        stats: Any = policy.forward_backward(batch, split.loss)
        wanted: Any = alone.forward_backward(batch, split.loss)
    routes, true = stats.routes, wanted.routes
    assert len(set(true.elsewhere_L.tolist())) > 1  # layers differ
    return {
        "error": error_of(model, other),
        "decisions": float((routes.decisions_L - true.decisions_L).abs().sum()),
        "elsewhere": float((routes.elsewhere_L - true.elsewhere_L).abs().sum()),
    }


REPLAYED = replace(MIXTURE, rollouts=(routed(UNEQUAL[0], 4),))


@needs_splits
@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(REPLAYED), Case(REPLAYED, cp=2)], ids=["two", "context"])
def test_experts_are_those_of_one_process(case: Case, tmp_path: Path) -> None:
    for found in run_ranks(case.size, replayed, case.split.save(tmp_path), case):
        assert max(found.values()) < BAR, found
