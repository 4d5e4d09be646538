"""Steps with images in every setting: adapters, offloading, recomputation, comparisons."""

import sys
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from host_models import checkpointing, lora, quiet_peft
from steps import ACROSS, relative_distance
from test_images import BAR, PAIRS, step, stock_gradients, tower, weighted

from forkpoint import Config, Media, RolloutBatch, UnsupportedError, wrap
from forkpoint.hosts.transformers import encoders
from forkpoint.hosts.transformers.families import MULTIMODAL
from forkpoint.losses import GRPO, RouterLoss
from forkpoint.losses.base import as_loss
from forkpoint.plan.predict import plan_cost
from forkpoint.plan.pricing.meters import meter_of
from forkpoint.step import self_check
from forkpoint.testing import dense_run, lifted_upcasts
from lanes import slow_besides
from media_scenes import image, rollout, scene, video
from multimodal_models import tiny_multimodal

FAMILIES = sorted({family for family, _ in PAIRS})
QWEN = [family for family in FAMILIES if MULTIMODAL[family].axes]
NAME = "tool tree"


def wanted_of(model: Any, batch: RolloutBatch) -> dict[str, Any]:
    return dict(dense_run(model, batch, as_loss(weighted)).gradients)


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


@pytest.mark.parametrize("family", slow_besides(["qwen3_vl"], QWEN))
def test_one_call_encodes_images_that_are_read_together(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_multimodal(family)
    media = [image(family, 0), video(family, 0), image(family, 1, rows=8)]
    media += [image(family, 2, columns=8), video(family, 1, frames=3)]
    prompt = [part for n, medium in enumerate(media) for part in (medium, [3 + n])]
    tool = [[9], image(family, 3), [5]]
    batch = RolloutBatch(
        [rollout(family, prompt, [[5, 6], *tool], 1.0), rollout(family, prompt, [[8]], -0.5)]
    )
    policy = wrap(model, replace(ACROSS, max_microbatch_tokens=64))
    with lifted_upcasts(model):
        wanted = stock_gradients(model, family, batch)
        assert relative_distance(step(policy, batch), wanted) < BAR
        calls = [e for e in policy.plan(batch, GRPO()).events() if "encode" in e]
        assert calls[:2] == ["encode images 0, 1, 2", "encode videos 4, 5"]
        assert calls[2:4] == ["encode image 3", "encode backward image 3"]
        assert calls[4:] == ["encode backward images 0, 1, 2", "encode backward videos 4, 5"]
        monkeypatch.setattr("forkpoint.plan.media.MOST_TOKENS", 12)
        assert relative_distance(step(policy, batch), wanted) < BAR
    calls = [e for e in policy.plan(batch, GRPO()).events() if "encode" in e]
    assert calls[:4] == ["encode images 0, 1", "encode image 2", "encode video 4", "encode video 5"]


def test_each_of_several_images_has_its_tokens() -> None:
    """Two wrong numbers of tokens have the right sum."""
    small, large = image("qwen3_vl", 0), image("qwen3_vl", 1, rows=8)
    media = [Media("image", small.inputs, large.tokens), Media("image", large.inputs, small.tokens)]
    batch = [rollout("qwen3_vl", [[3, 4], media[0], [5], media[1], [4]], [[5, 6]], 1.0)]
    policy = wrap(tiny_multimodal("qwen3_vl"), Config(self_check=False))
    with pytest.raises(UnsupportedError, match=r"8 tokens\) has image_grid_thw int64 \[\[1, 4, 4"):
        policy.forward_backward(batch, GRPO())


@pytest.mark.parametrize("family", slow_besides(["qwen3_vl"], FAMILIES))
def test_prices_and_budgets(family: str) -> None:
    """Encoders cost time and memory; beyond a budget they run again instead of being kept."""
    model, batch = tiny_multimodal(family), scene(NAME, family)
    with lifted_upcasts(model):
        policy = wrap(model, ACROSS)
        plan = policy.plan(batch, GRPO())
        encoder = plan.capabilities.encoder
        assert encoder is not None and not plan.encodes_again
        patches = sum(medium.tokens for medium in plan.media) * encoder.patches_per_token
        linear = [m for n, m in model.named_modules() if type(m) is torch.nn.Linear]
        inside = sum(
            m.weight.numel() for m in linear if any(m.weight is p for p in tower(model).values())
        )
        assert inside <= encoder.parameters <= 2 * inside + 3 * 16 * 16 * 64
        unpriced = replace(plan, capabilities=replace(plan.capabilities, encoder=None))
        work = plan_cost(plan, meter_of(plan)) - plan_cost(unpriced, meter_of(unpriced))
        assert work >= 3 * 2.0 * encoder.parameters * patches
        assert plan.predicted_peak_bytes is not None
        least = plan.predicted_peak_bytes - 1
        tight = policy.with_config(memory_budget=least, checkpointing="none", activations="keep")
        again = tight.plan(batch, GRPO())
        assert again.encodes_again and again.events() == plan.events()
        assert (again.predicted_peak_bytes or 0) <= least
        assert plan_cost(again, meter_of(again)) > plan_cost(plan, meter_of(plan))
        wanted = step(policy, batch, GRPO())
        assert relative_distance(step(tight, batch, GRPO()), wanted) < BAR


class OnDevice(torch.Tensor):
    """Tensor whose values the host waits for; counts how often."""

    waits: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("tolist", "item"):
            cls.waits.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("family", slow_besides(["qwen2_5_vl", "qwen3_vl"], QWEN))
def test_blocks_of_encoders_do_not_wait_for_the_device(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_multimodal(family)
    visual, waits = model.model.visual, OnDevice.waits
    encoder, blocks = encoders.TransformersEncoder(model), list(visual.blocks)

    def moved(value: Any, _: torch.device) -> Any:
        return torch.as_tensor(value).as_subclass(OnDevice)

    monkeypatch.setattr(encoders, "_tensor", moved)
    if family == "qwen2_5_vl":
        visual.fullatt_block_indexes = [1, 2]  # others see windows
        module = sys.modules[type(visual).__module__]
        windows = module.get_vision_window_index

        def made(*args: Any, kwargs: dict[str, Any], **others: Any) -> Any:
            given = "cu_window_seqlens" in kwargs
            found = windows(*args, kwargs=kwargs, **others)
            return found if given else tuple(x.as_subclass(OnDevice) for x in found)

        monkeypatch.setattr(module, "get_vision_window_index", made)
    found = []
    for depth in (1, 5):
        visual.blocks = torch.nn.ModuleList(blocks[:1] * depth)
        waits.clear()
        encoder.encode([image(family, rows=8), image(family)])
        found.append(len(waits))
    assert found[0] == found[1] > 0
