"""Steps with images in every setting: adapters, offloading, recomputation, comparisons."""

from typing import Any

import pytest
import torch
from host_models import checkpointing, lora, quiet_peft
from steps import ACROSS, relative_distance
from test_images import BAR, PAIRS, step, tower, weighted

from forkpoint import Config, Media, RolloutBatch, UnsupportedError, wrap
from forkpoint.losses import GRPO, RouterLoss
from forkpoint.losses.base import as_loss
from forkpoint.step import self_check
from forkpoint.testing import dense_run, lifted_upcasts
from lanes import slow_besides
from media_scenes import image, rollout, scene
from multimodal_models import tiny_multimodal

FAMILIES = sorted({family for family, _ in PAIRS})
NAME = "tool tree"


def wanted_of(model: Any, batch: RolloutBatch, loss: Any = weighted) -> dict[str, Any]:
    return dict(dense_run(model, batch, as_loss(loss)).gradients)


@pytest.mark.parametrize(
    "config",
    slow_besides(
        [Config(checkpointing="full", boundary="within")],
        [
            Config(checkpointing="full", boundary="within"),
            Config(activations="offload", boundary="across", max_microbatch_tokens=12),
            Config(activations="recompute", boundary="across", max_microbatch_tokens=12),
            Config(head_logits="keep", boundary="mixed", max_microbatch_tokens=30),
            Config(restore_grads=True, grad_accumulation_dtype="float32"),
        ],
    ),
    ids=lambda config: config.checkpointing + config.activations,
)
def test_settings(config: Config) -> None:
    model, batch = tiny_multimodal("qwen3_vl"), scene(NAME, "qwen3_vl")
    with lifted_upcasts(model):
        wanted = wanted_of(model, batch)
        assert relative_distance(step(wrap(model, config), batch), wanted) < BAR


@pytest.mark.slow
@quiet_peft
def test_adapters_of_tower_and_language_model() -> None:
    model: Any = lora(tiny_multimodal("qwen3_vl"), target_modules="all-linear")
    batch = scene(NAME, "qwen3_vl")
    with lifted_upcasts(model):
        wanted = wanted_of(model, batch)
        found = step(wrap(model, ACROSS), batch)
        assert any("lora" in name and found[name] is not None for name in tower(model))
        assert relative_distance(found, wanted) < BAR


def test_checkpointed_towers() -> None:
    """All blocks of the model are checkpointed, those of the tower as well."""
    model, batch = tiny_multimodal("qwen3_vl"), scene(NAME, "qwen3_vl")
    with lifted_upcasts(model):
        wanted = wanted_of(model, batch)
        checkpointing(model, use_reentrant=False)
        assert model.model.visual.blocks[0].gradient_checkpointing
        assert relative_distance(step(wrap(model, ACROSS), batch), wanted) < BAR
    model.model.language_model.gradient_checkpointing = False
    for block in model.model.language_model.layers:
        block.gradient_checkpointing = False
    checkpointing(model.model.visual, use_reentrant=True)
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        wrap(model).forward_backward(batch, GRPO())


def test_log_probs_with_a_backward() -> None:
    model, batch = tiny_multimodal("qwen2_5_vl"), scene("videos", "qwen2_5_vl")
    with lifted_upcasts(model):
        wanted = wanted_of(model, batch)
        policy = wrap(model, ACROSS)
        model.zero_grad()
        found = policy.logprobs(batch)
        mask = torch.tensor(batch.loss_mask)
        (-(found * torch.tensor(batch.advantages))[mask].sum()).backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
    assert relative_distance(gradients, wanted) < BAR


@pytest.mark.parametrize("family", slow_besides(["qwen3_vl"], FAMILIES))
def test_verify_and_the_sample(family: str) -> None:
    """The sample has an image, cut where the family lets that."""
    model = tiny_multimodal(family)
    batch = scene("group", family)
    policy = wrap(model)
    sample = self_check.sample_of(batch, policy.host)
    assert len(sample.media) == 1 and sample.media[0].tokens <= 16
    again = self_check.sample_of(sample, policy.host)
    assert again.lengths.tolist() == sample.lengths.tolist()
    policy.forward_backward(batch, GRPO())
    report = policy.verify(batch, GRPO())
    assert report.passed and len(report.plans) >= 2


@pytest.mark.slow
def test_losses_of_routers() -> None:
    model = tiny_multimodal("qwen3_vl_moe")
    with lifted_upcasts(model):
        policy = wrap(model, ACROSS)
        router = RouterLoss(load_balancing=0.1)
        assert policy.verify(scene(NAME, "qwen3_vl_moe"), GRPO(), router=router).passed


def test_wrong_numbers_of_tokens_leave_no_gradient() -> None:
    """Found when the encoder has run, which may be after other backwards."""
    model = tiny_multimodal("llava")
    inputs = image("llava").inputs
    rollouts = [
        rollout("llava", [[3, 4]], [[5, 6]], 1.0),
        rollout("llava", [[9, 9, 9], Media("image", inputs, 15), [4]], [[5]], -1.0),
    ]
    policy = wrap(model, Config(self_check=False, sharing="none", max_microbatch_tokens=20))
    with pytest.raises(UnsupportedError, match="stands for 15 tokens"):
        policy.forward_backward(rollouts, GRPO())
    assert all(p.grad is None for p in model.parameters())
