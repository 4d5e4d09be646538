"""Pipelines whose stages are split over sequences, modules or experts leave the gradients of one
process."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks
from scenarios_of_ranks import BAR, DEEP, UNEQUAL
from split_models import MOE, Split, load
from test_data_stages import own_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import forkpoint
from benchmarks.ranks.meshes import Meshes
from forkpoint import RolloutBatch
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.torch_dist.stages import StageLinks
from forkpoint.losses import GSPO, RouterLoss
from forkpoint.testing import lifted_upcasts
from versions import needs_splits

FOUR_LAYERS = {"num_hidden_layers": 4}


@dataclass(frozen=True)
class Case:
    split: Split = field(default_factory=lambda: Split(sizes=FOUR_LAYERS))
    pp: int = 2
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    replicated: bool = False
    loaded: bool = False
    """Whether transformers cuts the model itself, by its pp_size."""

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


def meshes_of(case: Case) -> Meshes:
    return Meshes(pp=case.pp, dp=case.dp, cp=case.cp, tp=case.tp, ep=case.ep)


def split_model(folder: Path, case: Case, meshes: Meshes) -> Any:
    """The model, whose modules ranks of one stage split."""
    if case.loaded:
        return load(folder, case.split, tp_size=case.tp, pp_size=case.pp)
    options = {"tp_size": case.tp, "ep_size": case.ep} if case.tp > 1 else {}
    with meshes.given_to_transformers():
        return load(folder, case.split, **options)


def held(model: Any, case: Case, meshes: Meshes) -> nn.Module:
    """The stage of a model, whose weights ranks with other tokens hold."""
    if case.dp * case.cp == 1:
        return model
    if not case.replicated:
        return meshes.sharded(model)
    forkpoint.cut(model, meshes.dense)
    data = meshes.dense["dp", "cp"]._flatten("data")
    return DistributedDataParallel(model, process_group=data.get_group())


def compared(folder: Path, case: Case) -> dict[str, float]:
    meshes, split = meshes_of(case), case.split
    model, other = split_model(folder, case, meshes), load(folder, split)
    own = RolloutBatch(split.rollouts[meshes.dense.get_local_rank("dp")])
    whole = RolloutBatch([r for part in split.rollouts for r in part])
    with lifted_upcasts(model), lifted_upcasts(other):
        policy = forkpoint.wrap(held(model, case, meshes), split.config, mesh=meshes.dense)
        alone = forkpoint.wrap(other, split.config)
        for _ in range(split.steps):
            loss = policy.forward_backward(own, split.loss).loss
            wanted = alone.forward_backward(whole, split.loss).loss
        scores = policy.score(own, entropy=True).per_token
        expected = alone.score(own, entropy=True).per_token
    return {
        "error": error_of(model, other),
        "loss": abs(loss - wanted),
        "scores": max(float((x - expected[name]).abs().max()) for name, x in scores.items()),
    }


def error_of(model: nn.Module, other: nn.Module, part: str = "") -> float:
    """Of this stage's gradients, of names with `part`, over the norm of all of these."""
    true = {name: p for name, p in other.named_parameters() if part in name}
    apart = 0.0
    for name, parameter in model.named_parameters():
        if part not in name:
            continue
        found, wanted = parameter.grad, true[name].grad
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert (found is None) == (wanted is None), name
        if found is not None and wanted is not None:
            apart += float((found - wanted).square().sum())
    norm = sum(float(p.grad.square().sum()) for p in true.values() if p.grad is not None)
    return (apart / norm) ** 0.5


def of(split: Split | None = None, **changes: Any) -> Split:
    split = split or Split()
    return replace(split, sizes={**FOUR_LAYERS, **split.sizes}, **changes)


EXPERTS = of(Split(family="qwen3_moe", sizes=MOE))
TIED = of(Split(sizes={"tie_word_embeddings": True}))
CASES: dict[str, Case] = {
    "context": Case(cp=2),
    "context, replicated": Case(cp=2, replicated=True),
    "context, two passes": Case(of(loss=GSPO()), cp=2),
    "context, a function": Case(of(loss=own_loss), cp=2),
    "context, tied": Case(TIED, cp=2),
    "context, experts": Case(EXPERTS, cp=2),
    "context, recomputed": Case(of(config=replace(DEEP, activations="recompute")), cp=2),
    "context, checkpointed": Case(of(config=replace(DEEP, checkpointing="full")), cp=2),
    "tensor": Case(tp=2),
    "tensor, llama": Case(of(Split(family="llama")), tp=2),
    "tensor, two passes": Case(of(loss=GSPO()), tp=2),
    "tensor, tied": Case(TIED, tp=2),
    "tensor, accumulated": Case(of(steps=2), tp=2),
    "tensor, recomputed": Case(of(config=replace(DEEP, activations="recompute")), tp=2),
    "tensor, experts": Case(EXPERTS, tp=2),
    "experts": Case(EXPERTS, tp=2, ep=2),
    "three stages": Case(tp=2, pp=3),
    "loaded in stages": Case(loaded=True, pp=3),
    "loaded in stages, tied": Case(TIED, loaded=True),
}
EIGHT: dict[str, Case] = {
    "context and tensor": Case(cp=2, tp=2),
    "data and tensor": Case(of(rollouts=UNEQUAL), dp=2, tp=2),
    "data and context": Case(of(rollouts=UNEQUAL), dp=2, cp=2),
    "context and experts": Case(EXPERTS, cp=2, tp=2, ep=2),
}


def check(case: Case, folder: Path) -> list[dict[str, float]]:
    found = run_ranks(case.size, compared, case.split.save(folder), case, limit_s=120)
    for each in found:
        assert max(each.values()) < BAR, each
    return found


@needs_splits
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_stages_leave_the_gradients_of_one_process(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path)


@needs_splits
@pytest.mark.slow
@pytest.mark.parametrize("name", EIGHT)
def test_eight_ranks_leave_the_gradients_of_one_process(name: str, tmp_path: Path) -> None:
    check(EIGHT[name], tmp_path)


def refused(folder: Path, case: Case) -> list[str]:
    """Messages for a model that transformers has cut, with meshes of other stages or none."""
    said = list[str]()
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    for mesh in (None, pairs):
        model = split_model(folder, case, meshes_of(case))
        with pytest.raises(UnsupportedError) as error:
            forkpoint.wrap(model, mesh=mesh)
        said.append(str(error.value))
    return said


@needs_splits
@pytest.mark.slow
def test_layouts_that_are_not_those_of_the_mesh(tmp_path: Path) -> None:
    case = Case(loaded=True, pp=4)
    for rank, said in enumerate(run_ranks(4, refused, case.split.save(tmp_path), case)):
        assert "wrap was given no mesh with the dimension 'pp'" in said[0]
        assert f"and transformers has loaded stage {rank} of 4" in said[1]


# Verification
# ------------------------------------------------------------


def verified(folder: Path, case: Case, router: Any) -> tuple[str, float, int]:
    meshes = meshes_of(case)
    model = split_model(folder, case, meshes)
    policy = forkpoint.wrap(held(model, case, meshes), case.split.config, mesh=meshes.dense)
    own = RolloutBatch(case.split.rollouts[meshes.dense.get_local_rank("dp")])
    report = policy.verify(own, case.split.loss, router=router)
    assert all(parameter.grad is None for parameter in model.parameters())
    return report.verdict, report.nearest.shared_error, len(report.plans[0].worst)


VERIFIED: dict[str, tuple[Case, Any]] = {
    "two": (Case(), None),
    "tied": (Case(TIED), None),
    "tensor": (Case(tp=2), None),
    "data": (Case(of(rollouts=UNEQUAL), dp=2), None),
    "context, router loss": (Case(EXPERTS, cp=2), RouterLoss(load_balancing=0.3)),
}


@needs_splits
@pytest.mark.slow
@pytest.mark.parametrize("name", VERIFIED)
def test_verify_compares_all_stages(name: str, tmp_path: Path) -> None:
    case, router = VERIFIED[name]
    folder = case.split.save(tmp_path)
    names = len(dict(load(folder, case.split).named_parameters()))
    found = run_ranks(case.size, verified, folder, case, router, limit_s=120)
    for verdict, error, parameters in found:
        assert verdict == "passed" and error < BAR and parameters == names
    assert len(set(found)) == 1  # the same report on every rank


@needs_splits
@pytest.mark.slow
def test_verify_sees_gradients_that_do_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = StageLinks._send

    def nothing(self: StageLinks, tensor: torch.Tensor, *to: Any) -> None:
        send(self, tensor * (to[0] > self.stage.index), *to)

    monkeypatch.setattr(StageLinks, "_send", nothing)
    case = Case()
    for verdict, *_ in run_ranks(2, verified, case.split.save(tmp_path), case, None):
        assert verdict == "failed"
