"""Multimodal models on stages of a pipeline, whose first one has the encoder of images."""

from functools import partial
from typing import Any

import pytest
import test_data_stages
from processes import run_ranks
from scenarios_of_ranks import BAR
from test_stages_of_ranks import Case, compared, mesh_of, through_logprobs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forkpoint import PlanError, Rollout, RolloutBatch, UnsupportedError, cut, wrap
from forkpoint.errors import RankError
from forkpoint.losses import GRPO, GSPO
from media_scenes import group, rollout, tool_tree, videos
from multimodal_models import tiny_multimodal

TEXT = [rollout("qwen3_vl", [[3, 4, 5, 8, 9]], [[n, 7, n]], 0.3 * n - 2.0) for n in (8, 9, 10)]


def multimodal(family: str, rollouts: list[Rollout], layers: int = 3, **options: Any) -> Case:
    make = partial(tiny_multimodal, family, num_hidden_layers=layers, **options.pop("text", {}))
    return Case(make=make, rollouts=rollouts, **options)


def frozen_tower(model: Any) -> None:
    model.model.visual.requires_grad_(False)


def the_tower_alone(model: Any) -> None:
    model.requires_grad_(False)
    model.model.visual.requires_grad_(True)


def tower_and_last(model: Any) -> None:
    the_tower_alone(model)
    model.model.language_model.layers[-1].requires_grad_(True)


CASES = {
    "deep features": multimodal("qwen3_vl", tool_tree("qwen3_vl")),
    "axes": multimodal("qwen2_5_vl", group("qwen2_5_vl")),
    "video, three stages": multimodal("qwen3_vl", videos("qwen3_vl"), stages=3),
    "mistral3": multimodal("mistral3", tool_tree("mistral3")),
    "internvl, two passes": multimodal("internvl", group("internvl"), loss=GSPO(), steps=2),
    "tied": multimodal("qwen3_vl", group("qwen3_vl"), text={"tie_word_embeddings": True}),
    "log-probs": multimodal("qwen3_vl", tool_tree("qwen3_vl"), step=through_logprobs),
    "a frozen tower": multimodal("qwen3_vl", tool_tree("qwen3_vl"), alone=frozen_tower),
    "the tower alone": multimodal("qwen3_vl", tool_tree("qwen3_vl"), alone=the_tower_alone),
    "text": multimodal("qwen3_vl", TEXT),
    "text of gemma3": multimodal("gemma3", TEXT),
    "text, below the head frozen": multimodal("qwen3_vl", TEXT, alone=tower_and_last),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_stages_leave_the_gradients_of_one_process(name: str) -> None:
    case = CASES[name]
    for found in run_ranks(case.stages, compared, case):
        assert max(found["gradients"], found["loss"], found["scores"]) < BAR, found
        assert found["own"] < 1, found


def parameters(stages: int) -> list[str]:
    model = tiny_multimodal("qwen3_vl")
    wrap(model, mesh=mesh_of(stages))
    return [name for name, _ in model.named_parameters()]


@pytest.mark.slow
def test_the_first_stage_alone_has_the_encoder() -> None:
    first, second = run_ranks(2, parameters, 2)
    assert any(name.startswith("model.visual.") for name in first)
    assert not any(name.startswith("model.visual.") for name in second)


def verified() -> bool:
    policy = wrap(tiny_multimodal("qwen3_vl"), mesh=mesh_of(2))
    return policy.verify(RolloutBatch(tool_tree("qwen3_vl")), GRPO()).passed


@pytest.mark.slow
def test_verify_passes_on_stages() -> None:
    assert all(run_ranks(2, verified))


def too_many() -> str:
    model = tiny_multimodal("qwen3_vl", num_hidden_layers=2)
    model.config.vision_config.deepstack_visual_indexes = [0, 0]
    try:
        wrap(model, mesh=mesh_of(2))
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_layers_that_read_features_lie_on_the_first_stage() -> None:
    for message in run_ranks(2, too_many):
        assert "features of images enter after the first 2" in message
        assert "Take 1 to 1 stages." in message


def of_data_ranks(case: test_data_stages.Case) -> dict[str, Any]:
    test_data_stages.model_of = lambda _: tiny_multimodal("qwen3_vl")
    return test_data_stages.compared(case)


REPLICATED = test_data_stages.Case("replicated", rollouts=(tool_tree("qwen3_vl"), TEXT))


@pytest.mark.slow
def test_data_ranks_of_stages() -> None:
    for found in run_ranks(4, of_data_ranks, REPLICATED):
        assert max(found["gradients"], found["loss"], found["scores"]) < BAR, found


def sharded_stages() -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    model = tiny_multimodal("qwen3_vl")
    cut(model, mesh)
    policy = wrap(fully_shard(model, mesh=mesh["dp"]), mesh=mesh)
    try:
        policy.forward_backward(RolloutBatch(tool_tree("qwen3_vl")), GRPO())
    except (UnsupportedError, RankError) as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_sharded_stages_refuse_images() -> None:
    for message in run_ranks(2, sharded_stages):
        assert "Use DistributedDataParallel" in message, message
