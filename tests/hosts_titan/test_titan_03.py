"""Models of torchtitan 0.3 that are checkpointed or on two ranks, and what is refused by name."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from processes import run_ranks
from scenarios_of_ranks import BAR, DEEP, EMPTY, UNEQUAL, Scenario, compared, distance, gradients
from steps import ACROSS, forked_batch, step_error
from titan_models import titan_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.deepseek_v3.mtp import MTPTransformerBlock

import forkpoint
from benchmarks.ranks.titan import without_scaled_sums
from forkpoint import RolloutBatch, UnsupportedError, losses, wrap
from forkpoint.losses import GRPO, GSPO
from forkpoint.testing import lifted_upcasts

BATCH = forked_batch()


@pytest.mark.parametrize("policy", [FullAC, SelectiveAC])
def test_activation_checkpointing(policy: Any) -> None:
    model = titan_model("qwen3")
    policy.Config().build().apply(model)
    assert step_error(model, BATCH, losses.GRPO(), ACROSS) < BAR
    assert wrap(model).verify(BATCH, losses.GRPO()).passed


def test_projections_of_queries_keys_and_values_apart() -> None:
    assert step_error(titan_model("llama3", fuse_qkv=False), BATCH, losses.GRPO(), ACROSS) < BAR


# Ranks
# ------------------------------------------------------------


def sharded(model: Any, *, checkpoint: bool = False, reshard: str = "default") -> nn.Module:
    """As parallelize_llama and parallelize_qwen3 do it with the backend "partial_dtensor"."""
    if checkpoint:
        FullAC.Config().build().apply(model)
    apply_fsdp_to_decoder(
        model,
        init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)),
        param_dtype=torch.float64,
        reduce_dtype=torch.float64,
        pp_enabled=False,
        reshard_after_forward_policy=reshard,
    )
    without_scaled_sums(model)
    return model


@pytest.mark.parametrize(
    ("family", "options", "scenario"),
    [
        ("llama3", {}, {"gather": "step"}),
        ("qwen3", {"checkpoint": True}, {"rollouts": EMPTY}),
        ("qwen3", {"reshard": "always"}, {"loss": GSPO(), "steps": 2}),
        ("tied", {}, {}),
    ],
)
def test_fully_shard(family: str, options: dict[str, Any], scenario: dict[str, Any]) -> None:
    tied = {"enable_weight_tying": True} if family == "tied" else {}
    make = partial(titan_model, family, **tied)
    made = Scenario(wrap=partial(sharded, **options), make=make, **scenario)
    for found in run_ranks(2, compared, made):
        assert found["error"] < BAR and found["loss"] < BAR, found
        assert found["shared"] or made.rollouts is EMPTY


def one_batch(family: str, dimension: str) -> float:
    """The distance from one process of a step whose layers or tokens two ranks have in parts."""
    model, other = (titan_model(family) for _ in range(2))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(dimension,))
    if dimension == "pp":
        forkpoint.cut(model, mesh)
    else:
        sharded(model)
    batch = RolloutBatch(UNEQUAL[0])
    with lifted_upcasts(model), lifted_upcasts(other):
        wrap(model, DEEP, mesh=mesh).forward_backward(batch, GRPO())
        wrap(other, DEEP).forward_backward(batch, GRPO())
    found = gradients(model)
    return distance(found, {name: gradients(other)[name] for name in found}, list(found))


@pytest.mark.parametrize(("family", "dimension"), [("llama3", "pp"), ("qwen3", "cp")])
def test_stages_and_context(family: str, dimension: str) -> None:
    for error in run_ranks(2, one_batch, family, dimension):
        assert error < BAR


# Refusals
# ------------------------------------------------------------


def test_dispatchers_of_other_libraries_are_refused() -> None:
    class DeepEPTokenDispatcher(AllToAllTokenDispatcher):
        pass

    model: Any = titan_model("qwen3_moe")
    model.layers["1"].moe.routed_experts.token_dispatcher.__class__ = DeepEPTokenDispatcher
    with pytest.raises(UnsupportedError, match=r"1.moe.routed_experts sends.*DeepEP.*standard"):
        wrap(model)


def test_predictions_of_later_tokens_are_refused() -> None:
    config: Any = titan_model("deepseek_v3").config
    norm = config.norm
    block = config.layers[0]
    given = {name: getattr(block, name) for name in ("attention", "attention_norm", "ffn_norm")}
    later = MTPTransformerBlock.Config(
        **given,
        feed_forward=block.feed_forward,
        enorm=norm,
        hnorm=norm,
        eh_proj=Linear.Config(in_features=2 * config.dim, out_features=config.dim),
        mtp_norm=norm,
    )
    with pytest.raises(UnsupportedError, match=r"mtp_layers.0 predicts.*num_mtp_layers to 0"):
        wrap(replace(config, mtp_layers=[later]).build())
