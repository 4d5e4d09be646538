"""Models that torchtitan 0.3's Module.parallelize splits over ranks, with "partial_dtensor"."""

from typing import Any

import pytest
from processes import run_ranks
from scenarios_of_ranks import BAR, UNEQUAL, said
from titan_models import titan_model
from titan_parallel import Case, compared
from titan_parallel_03 import dims_of, parallelize

from forkpoint import RolloutBatch, wrap
from forkpoint.losses import GRPO, GSPO

FULL = {"checkpoint": "full"}


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (2, Case("llama3")),
        (2, Case("qwen3", {"tp": 2, **FULL}, loss=GSPO(), steps=2)),
        (2, Case("qwen3", sizes={"sequence_parallel": False})),
        (4, Case("qwen3", {"tp": 2, "dp_shard": 2}, rollouts=UNEQUAL)),
    ],
)
def test_gradients_are_those_of_one_process(ranks: int, case: Case) -> None:
    for found in run_ranks(ranks, compared, case):
        assert found["error"] < BAR and found["loss"] < BAR and found["scores"] < BAR, found
        assert found["shared"]


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
    return [*found, said(lambda: wrap(foreign))]


def stage_of_four() -> str:
    model = titan_model("llama3")
    dims = parallelize(model, pp=2, tp=2)
    return said(lambda: wrap(model, mesh=dims.get_mesh(["pp"])))


def test_split_stages_are_refused() -> None:
    for found in run_ranks(4, stage_of_four):
        assert "blocks take DTensors where stages send plain tensors" in found, found


def test_other_splits_are_refused_by_name() -> None:
    for context, backend, foreign in run_ranks(2, refused):
        assert "own context parallelism" in context, context
        assert "backend 'spmd_types'" in backend and "'partial_dtensor'" in backend, backend
        assert "layers.1.attention.inner_attention had a forward of its own" in foreign, foreign
