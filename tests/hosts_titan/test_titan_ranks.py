"""Models of torchtitan on two ranks, held by torchtitan's own FSDP."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from scenarios_of_ranks import BAR, EMPTY, UNEQUAL, Scenario, compared
from titan_models import titan_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.config.job_config import ActivationCheckpoint, Compile
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import apply_compile, apply_fsdp

from benchmarks.ranks.titan import without_scaled_sums
from forkpoint import RolloutBatch, UnsupportedError, wrap
from forkpoint.losses import GRPO, GSPO


def sharded(
    model: Any, *, checkpoint: bool = False, reshard: str = "default", compiled: bool = False
) -> nn.Module:
    """As parallelize_llama and parallelize_qwen3 do it."""
    if checkpoint:
        apply_ac(model, ActivationCheckpoint(mode="full"))
    if compiled:
        apply_compile(model, Compile(enable=True))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    apply_fsdp(
        model,
        mesh,
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
        ("llama3", {}, {}),
        ("qwen3", {"checkpoint": True}, {"rollouts": EMPTY}),
        ("qwen3", {"reshard": "always"}, {"loss": GSPO(), "steps": 2}),
        ("llama3", {"reshard": "never"}, {"gather": "step"}),
    ],
)
def test_gradients_are_those_of_one_process(
    family: str, options: dict[str, Any], scenario: dict[str, Any]
) -> None:
    made = Scenario(wrap=partial(sharded, **options), make=partial(titan_model, family), **scenario)
    for found in run_ranks(2, compared, made):
        assert found["error"] < BAR and found["loss"] < BAR, found
        assert found["shared"] or made.rollouts is EMPTY


def refused() -> str:
    model = sharded(titan_model("qwen3"), compiled=True)
    with pytest.raises(UnsupportedError) as raised:
        wrap(model)
    return str(raised.value)


def test_blocks_compiled_before_fsdp_are_refused() -> None:
    for message in run_ranks(2, refused):
        assert "layers.0 was compiled" in message and "compile.enable" in message


def verified() -> bool:
    policy = wrap(sharded(titan_model("qwen3"), checkpoint=True))
    return policy.verify(RolloutBatch(UNEQUAL[dist.get_rank()]), GRPO()).passed


def test_verify() -> None:
    assert run_ranks(2, verified) == [True, True]
