"""Models that torchtitan's own tensor, sequence and expert parallelism splits over ranks."""

from typing import Any

import pytest
import torch
from processes import run_ranks
from scenarios_of_ranks import BAR, EMPTY, UNEQUAL, distance, gradients, group, said
from titan_models import titan_model
from titan_parallel import Case, biases_of_both, compared, ordinary
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.expert_parallel import DeepEPExpertParallel

import forkpoint
from benchmarks.ranks.titan import models_on_cpus, parallelize
from forkpoint import Config, Policy, RolloutBatch, wrap
from forkpoint.losses import GRPO, GSPO, LogLikelihood

FULL = {"checkpoint": "full"}
TOGETHER = {"dp_shard": 2, "ep": 2}


def context(model: nn.Module, config: Config, dims: ParallelDims) -> Policy:
    return wrap(model, config, mesh=dims.get_mesh("cp"))


def stages(model: nn.Module, config: Config, dims: ParallelDims) -> Policy:
    names = [name for name in ("pp", "cp") if dims.get_optional_mesh(name) is not None]
    return wrap(model, config, mesh=dims.get_mesh(names))


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (2, Case("llama3")),
        (2, Case("llama3", {"tp": 2, "loss_parallel": False, **FULL}, loss=GSPO(), steps=2)),
        (2, Case("qwen3")),
        (2, Case("qwen3_moe")),
        (2, Case("qwen3_moe", {"dp_shard": 2}, rollouts=UNEQUAL)),
        (2, Case("qwen3_moe", TOGETHER, rollouts=EMPTY)),
        (2, Case("deepseek_v3", {"tp": 2, **FULL})),
        (2, Case("llama3", {"cp": 2}, wrap=context)),
        (2, Case("qwen3", {"pp": 2, **FULL}, wrap=stages)),
        (2, Case("deepseek_v3", {"pp": 2}, wrap=stages)),
        (2, Case("deepseek_v3", {"cp": 2, **FULL}, wrap=context)),
        (2, Case("deepseek_v3", {**TOGETHER, **FULL}, rollouts=UNEQUAL)),
        pytest.param(2, Case("deepseek_v3"), marks=pytest.mark.slow),
        pytest.param(
            4, Case("qwen3", {"tp": 2, "dp_shard": 2}, rollouts=UNEQUAL), marks=pytest.mark.slow
        ),
        pytest.param(
            4,
            Case("qwen3", {"dp_replicate": 2, "dp_shard": 2}, rollouts=(*UNEQUAL, *EMPTY)),
            marks=pytest.mark.slow,
        ),
        pytest.param(4, Case("qwen3", {"pp": 2, "tp": 2}, wrap=stages), marks=pytest.mark.slow),
        pytest.param(
            4,
            Case("llama3", {"pp": 2, "dp_shard": 2}, rollouts=UNEQUAL, wrap=stages),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            8, Case("qwen3", {"pp": 2, "tp": 2, "cp": 2}, wrap=stages), marks=pytest.mark.slow
        ),
        pytest.param(
            4, Case("qwen3_moe", {"tp": 2, "cp": 2, **FULL}, wrap=context), marks=pytest.mark.slow
        ),
        pytest.param(
            4,
            Case("qwen3_moe", {"dp_shard": 2, "cp": 2, "ep": 2}, rollouts=UNEQUAL, wrap=context),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            Case("qwen3_moe", {"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2}, rollouts=UNEQUAL),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_are_those_of_one_process(ranks: int, case: Case) -> None:
    for found in run_ranks(ranks, compared, case, limit_s=60 * ranks):
        assert found["error"] < BAR and found["loss"] < BAR and found["scores"] < BAR, found
        assert found["shared"] or [] in case.rollouts
        # Data and context ranks have parts of the counts.
        assert found["counts"] or len(case.rollouts) > 1 or "cp" in case.options


EVEN = [r for seed in (5, 6) for r in group(seed, 6, 16, 12) if len(r.token_ids) % 2]
"""Sequence parallelism takes inputs of even lengths."""


def beside_its_own_passes() -> dict[str, Any]:
    """A step in float32, and torchtitan's own passes in both dtypes with the same parallelism."""
    models_on_cpus()
    found = []
    for dtype in (torch.float64, torch.float32):
        model = titan_model("qwen3", dtype=dtype)
        parallelize(model, tp=2)
        found.append(ordinary(model, EVEN))
    exact, own = found
    model.zero_grad()
    policy = wrap(model)
    policy.forward_backward(RolloutBatch(EVEN), LogLikelihood())
    names = list(exact)
    error, rounding = distance(gradients(model), exact, names), distance(own, exact, names)
    again = ordinary(model, EVEN)
    return {
        "error": error,
        "rounding": rounding,
        "same": all(torch.equal(again[n], own[n]) for n in names),  # type: ignore[arg-type]
        "verified": policy.verify(RolloutBatch(EVEN), GRPO()).passed,
    }


def test_torchtitan_s_own_passes() -> None:
    """A step is as near to float64, and leaves no trace: later ones are the same to the bit."""
    for found in run_ranks(2, beside_its_own_passes):
        assert found["error"] < max(1e-5, 1.1 * found["rounding"]), found
        assert found["same"] and found["verified"], found


# Counts of experts
# ------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3_moe", {"dp_shard": 2, **FULL}),
        pytest.param(Case("qwen3_moe", {"tp": 2}), marks=pytest.mark.slow),
        pytest.param(Case("deepseek_v3", TOGETHER), marks=pytest.mark.slow),
    ],
)
def test_biases_move_as_in_dense_training(case: Case) -> None:
    for same, moved in run_ranks(2, biases_of_both, case, limit_s=240):
        assert same and moved > 5e-3, "they have moved"


# Refusals
# ------------------------------------------------------------


def refused_stages() -> list[str]:
    tied = titan_model("qwen3", enable_weight_tying=True)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    alone, partly = titan_model("llama3"), titan_model("llama3")
    forkpoint.cut(alone, mesh)
    del partly.layers["1"]  # type: ignore[operator]
    return [
        said(lambda: forkpoint.cut(tied, mesh)),
        said(lambda: wrap(alone)),
        said(lambda: wrap(partly, mesh=mesh)),
    ]


def test_stages_that_are_refused() -> None:
    for tied, alone, partly in run_ranks(2, refused_stages):
        assert "enable_weight_tying" in tied, tied
        assert "no mesh with the dimension 'pp'" in alone, alone
        assert "layers 0, 2 of 3" in partly, partly


def refused() -> list[str]:
    models_on_cpus()
    tied, partly, foreign, wrong = (
        titan_model(*made, **options)
        for made, options in (
            (("qwen3",), {"enable_weight_tying": True}),
            (("llama3",), {}),
            (("qwen3_moe",), {}),
            (("qwen3_moe",), {}),
        )
    )
    dims = parallelize(tied, tp=2)
    mesh = dims.get_mesh("tp")
    parallelize_module(partly, mesh, {"layers.0.attention.wq": ColwiseParallel()})
    DeepEPExpertParallel()._apply(foreign.layers["0"].moe.experts, mesh)  # type: ignore[operator]
    parallelize(wrong, tp=2, ep=2)
    return [said(lambda model=model: wrap(model)) for model in (tied, partly, foreign, wrong)]


def test_other_splits_are_refused_by_name() -> None:
    for tied, partly, foreign, wrong in run_ranks(2, refused):
        assert "enable_weight_tying" in tied, tied
        assert "tok_embeddings.weight is not" in partly, partly
        assert "DeepEPExpertParallel" in foreign, foreign
        assert "ReordererSequenceParallel" in wrong, wrong
