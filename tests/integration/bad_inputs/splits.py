"""Models split over ranks (tensor, expert parallelism): how ranks differ, what is refused."""

from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from bad_inputs.kind import Kind
from bad_inputs.models import in_process_group
from forkpoint import Config, wrap
from forkpoint.errors import ConfigError, RankError
from forkpoint.parallel.copies import Contents, check_same_batches, check_same_losses
from forkpoint.plan.stages import Stage
from forkpoint.testing import tiny_model
from versions import SPLITS_OTHERWISE


def split(model: Any, mesh: DeviceMesh, style: str = "colwise_gather_output") -> PreTrainedModel:
    """The model with one module split by transformers, over one rank."""
    skip_where_models_split_otherwise()
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    where = "lm_head" if style == "colwise_gather_output" else "model.norm"
    rules = {f"{where}.weight": style, where: style}
    apply_tensor_parallelism(model, mesh, rules if where == "lm_head" else {where: style})
    return model


def skip_where_models_split_otherwise() -> None:
    if SPLITS_OTHERWISE:
        pytest.skip("this transformers splits models otherwise")


def within_replicas(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(split(model, mesh), init_sync=False)


def compiled(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    wrap(split(model, mesh), Config(compile_blocks=True))
    return model


def with_nameless_mesh(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    wrap(split(model, mesh), mesh=mesh)
    return model


def in_stages(model: Any, mesh: DeviceMesh) -> nn.Module:
    skip_where_models_split_otherwise()
    from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

    model.model.layers[-1] = PipelineIdentityLayer()
    return split(model, mesh)


def llama4() -> Any:
    small = {"num_local_experts": 2, "intermediate_size_mlp": 48, "pad_token_id": 0}
    return wrap(tiny_model("llama4_text", **small)).host


def contents(rollouts: str = "a", plan: str = "b", *numbers: float) -> Contents:
    return Contents(rollouts, plan, numbers)


def differ(other: Contents) -> Any:
    one = contents("a", "b", 1.0)
    return lambda: check_same_batches([one, one, one, other], [0, 1, 2, 3], [0, 0, 1, 1])


WHO = "ranks 2 and 3 hold one copy of the model, and "
NO_STEP = "so no rank runs this step, and gradients are unchanged. "

SPLITS: tuple[Kind, ...] = (
    Kind(
        error=RankError,
        message=f"{WHO}have different batches, {NO_STEP}Give both the same rollouts, with the same "
        "advantages, log-probs and extras.",
        call=differ(contents("c", "b", 1.0)),
    ),
    Kind(
        error=RankError,
        message="ranks 0 and 1 hold one copy of the model, and came to different losses",
        call=lambda: check_same_losses([0.5, 0.75], [0, 1], [0, 0]),
    ),
    Kind(
        message="DistributedDataParallel holds a model whose modules are split over ranks, which",
        call=in_process_group(within_replicas),
    ),
    Kind(
        message="model.norm is split over ranks by SequenceParallel",
        call=in_process_group(lambda model, mesh: split(model, mesh, "sequence_parallel")),
    ),
    Kind(
        message="transformers has cut the model into pipeline stages (pp_size), and wrap was",
        call=in_process_group(in_stages),
    ),
    Kind(
        message="Config(compile_blocks=True) asks for compiled decoder blocks, which are not",
        call=in_process_group(compiled),
    ),
    Kind(
        message="Llama4ForCausalLM is divided over ranks by stages of a pipeline, which has not",
        call=lambda: llama4().entry.stage.hold(Stage(0, 2, 0, 1, 3)),
    ),
    Kind(
        message="Llama4ForCausalLM is divided over ranks by context parallelism, which has not",
        call=lambda: llama4().entry.check_context_parallel(2),
    ),
    Kind(
        error=ConfigError,
        message="mesh is a DeviceMesh without names of its dimensions;",
        call=in_process_group(with_nameless_mesh),
    ),
)
