"""Models that torchtitan 0.3's Module.parallelize splits over ranks, with "partial_dtensor"."""

from typing import Any

import pytest
from processes import run_ranks
from scenarios_of_ranks import BAR, EMPTY, UNEQUAL, said
from titan_models import titan_model
from titan_parallel import Case, biases_of_both, compared
from titan_parallel_03 import dims_of, parallelize
from torch import nn
from torchtitan.distributed import ParallelDims

from forkpoint import Config, Policy, RolloutBatch, wrap
from forkpoint.losses import GRPO, GSPO

FULL = {"checkpoint": "full"}
EXPERTS = {"expert_parallel": True}
TOGETHER = {"options": {"dp_shard": 2, "ep": 2}, "sizes": EXPERTS}


def stages(model: nn.Module, config: Config, dims: ParallelDims) -> Policy:
    return wrap(model, config, mesh=dims.get_mesh(["pp"]))


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (2, Case("llama3")),
        (2, Case("qwen3", {"tp": 2, **FULL}, loss=GSPO(), steps=2)),
        (2, Case("qwen3", sizes={"sequence_parallel": False})),
        (4, Case("qwen3", {"tp": 2, "dp_shard": 2}, rollouts=UNEQUAL)),
        (2, Case("qwen3_moe", {"dp_shard": 2}, rollouts=UNEQUAL)),
        (2, Case("qwen3_moe", {"tp": 2, "ep": 2}, EXPERTS)),
        (2, Case("qwen3_moe", {"tp": 2, **FULL}, {"sequence_parallel": False})),
        (2, Case("deepseek_v3", {"tp": 2, "ep": 2, **FULL}, EXPERTS)),
        (2, Case("qwen3_moe", rollouts=EMPTY, **TOGETHER)),
        (2, Case("deepseek_v3", rollouts=UNEQUAL, **TOGETHER)),
        pytest.param(4, Case("qwen3", {"pp": 2, "tp": 2}, wrap=stages), marks=pytest.mark.slow),
        pytest.param(
            4,
            Case("qwen3_moe", {"pp": 2, "tp": 2, "ep": 2, **FULL}, EXPERTS, wrap=stages),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_are_those_of_one_process(ranks: int, case: Case) -> None:
    for found in run_ranks(ranks, compared, case):
        assert found["error"] < BAR and found["loss"] < BAR and found["scores"] < BAR, found
        assert found["shared"] or [] in case.rollouts
        # Data ranks have parts of the counts.
        assert found["counts"] or len(case.rollouts) > 1


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3_moe", {"dp_shard": 2, **FULL}),
        pytest.param(Case("qwen3_moe", {"tp": 2, "ep": 2}, EXPERTS), marks=pytest.mark.slow),
        pytest.param(Case("deepseek_v3", **TOGETHER), marks=pytest.mark.slow),
    ],
)
def test_biases_move_as_in_dense_training(case: Case) -> None:
    for same, moved in run_ranks(2, biases_of_both, case, limit_s=240):
        assert same and moved > 5e-3, "they have moved"


def verified() -> bool:
    model = titan_model("qwen3")
    parallelize(model, tp=2)
    return wrap(model).verify(RolloutBatch(UNEQUAL[0]), GRPO()).passed


def test_verify() -> None:
    assert all(run_ranks(2, verified))


def refused() -> list[str]:
    found = []
    for backend, degrees in (("partial_dtensor", {"cp": 2}), ("spmd_types", {"tp": 2})):
        model: Any = titan_model("llama3")
        dims = dims_of(**degrees)
        model.parallelize(dims)
        dims.spmd_backend = backend
        found.append(said(lambda model=model: wrap(model)))
    foreign: Any = titan_model("llama3")
    inner = foreign.layers["1"].attention.inner_attention
    inner.forward = lambda q, k, v, **_: q
    foreign.parallelize(dims_of(tp=2))
    wrong: Any = titan_model("qwen3_moe")
    wrong.parallelize(dims_of(tp=2))
    return [*found, said(lambda: wrap(foreign)), said(lambda: wrap(wrong))]


def whole_hidden() -> str:
    model = titan_model("llama3", sequence_parallel=False)
    dims = parallelize(model, pp=2, tp=2)
    return said(lambda: wrap(model, mesh=dims.get_mesh(["pp"])))


def test_stages_without_sequence_parallelism_are_refused() -> None:
    for found in run_ranks(4, whole_hidden):
        assert "stage of a pipeline" in found and "enable_sequence_parallel" in found, found


def test_other_splits_are_refused_by_name() -> None:
    for context, backend, foreign, wrong in run_ranks(2, refused):
        assert "context parallelism" in context, context
        assert "backend 'spmd_types'" in backend and "'partial_dtensor'" in backend, backend
        assert "layers.1.attention.inner_attention had a custom forward" in foreign, foreign
        assert "sequence parallelism" in wrong and "experts are wrong" in wrong, wrong
