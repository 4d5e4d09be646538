"""Multimodal models on stages of a pipeline, whose first one has the encoder of images."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases_of_ranks import Case, check, named, over_replicas, over_trained_replicas
from processes import run_ranks
from scenarios_of_ranks import said, through_logprobs
from test_image_ranks import frozen_text, frozen_tower, tower_and_last_layer
from test_stages_of_ranks import mesh_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forkpoint import Rollout, RolloutBatch, cut, wrap
from forkpoint.losses import GRPO, GSPO
from media_scenes import group, rollout, tool_tree, videos
from multimodal_models import tiny_multimodal

TEXT = [rollout("qwen3_vl", [[3, 4, 5, 8, 9]], [[n, 7, n]], 0.3 * n - 2.0) for n in (8, 9, 10)]


def last_layer(model: Any) -> None:
    model.requires_grad_(False)
    model.model.language_model.layers[-1].requires_grad_(True)


def multimodal(family: str, *rollouts: list[Rollout], **options: Any) -> Case:
    make = partial(tiny_multimodal, family, num_hidden_layers=3, **options.pop("text", {}))
    return Case(make=make, rollouts=rollouts, **{"pp": 2, **options})


TREE = tool_tree("qwen3_vl")
CASES = {
    "deep features": multimodal("qwen3_vl", TREE),
    "axes": multimodal("qwen2_5_vl", group("qwen2_5_vl")),
    "video, three stages": multimodal("qwen3_vl", videos("qwen3_vl"), pp=3),
    "mistral3": multimodal("mistral3", tool_tree("mistral3")),
    "internvl, two passes": multimodal("internvl", group("internvl"), loss=GSPO(), steps=2),
    "tied": multimodal("qwen3_vl", group("qwen3_vl"), text={"tie_word_embeddings": True}),
    "log-probs": multimodal("qwen3_vl", TREE, step=through_logprobs),
    "a frozen tower": multimodal("qwen3_vl", TREE, alone=frozen_tower),
    "the tower alone": multimodal("qwen3_vl", TREE, alone=frozen_text),
    "text of gemma3": multimodal("gemma3", TEXT),
    "text, below the head frozen": multimodal("qwen3_vl", TEXT, alone=tower_and_last_layer),
    "data ranks": multimodal("qwen3_vl", TREE, TEXT, hold=over_replicas),
    "data ranks, a frozen stage": multimodal(
        "qwen3_vl", TREE, TEXT, hold=over_trained_replicas, alone=last_layer
    ),
    "data ranks, the tower alone": multimodal(
        "qwen3_vl", TREE, TEXT, hold=over_trained_replicas, alone=frozen_text
    ),
}


@named(CASES)
def test_stages_leave_the_gradients_of_one_process(name: str, tmp_path: Path) -> None:
    for found in check(CASES[name], tmp_path):
        assert found["held"] < 1, found


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
    return said(lambda: wrap(model, mesh=mesh_of(2)))


@pytest.mark.slow
def test_layers_that_read_features_lie_on_the_first_stage() -> None:
    for message in run_ranks(2, too_many):
        assert message.startswith("PlanError") and "Take 1 to 1 stages." in message
        assert "features of images enter after the first 2" in message


def text_below_a_frozen_model() -> str:
    model = tiny_multimodal("qwen3_vl")
    frozen_text(model)
    policy = wrap(model, mesh=mesh_of(2))
    return said(lambda: policy.forward_backward(RolloutBatch(TEXT), GRPO()))


@pytest.mark.slow
def test_text_needs_a_language_model_that_trains() -> None:
    for message in run_ranks(2, text_below_a_frozen_model):
        assert "no parameter that these rollouts run requires a gradient" in message, message


def sharded_stages() -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    model = tiny_multimodal("qwen3_vl")
    cut(model, mesh)
    policy = wrap(fully_shard(model, mesh=mesh["dp"]), mesh=mesh)
    batch, runs = RolloutBatch(TREE), []
    step = said(lambda: policy.forward_backward(batch, GRPO()))
    return [step, said(lambda: policy.verify(batch, GRPO(), progress=runs.append)), *runs]


@pytest.mark.slow
def test_sharded_stages_refuse_images() -> None:
    for messages in run_ranks(2, sharded_stages):
        assert len(messages) == 2, messages
        assert all("Use DistributedDataParallel" in message for message in messages), messages
