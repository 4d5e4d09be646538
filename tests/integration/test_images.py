"""Images and video: each distinct one is encoded once, and all gradients are those of stock."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from steps import ACROSS, clear_gradients, gradients, relative_distance
from torch import Tensor, nn

from forkpoint import Config, Media, PlanError, Rollout, RolloutBatch, UnsupportedError, wrap
from forkpoint.engine import media as engine_media
from forkpoint.hosts.transformers.families import MULTIMODAL
from forkpoint.losses import GRPO, GSPO
from forkpoint.testing import dense_run, lifted_upcasts, tiny_model
from lanes import slow_besides, slow_besides_every
from media_scenes import SCENES, image, rollout, scene, stock_inputs, video
from multimodal_models import IMAGE, tiny_multimodal

BAR = 1e-10
CONFIGS = (
    ACROSS,
    Config(sharing="tree", boundary="within"),
    Config(sharing="group", boundary="mixed", max_microbatch_tokens=17),
    Config(sharing="tree", boundary="across", max_microbatch_tokens=9, activations="recompute"),
    Config(sharing="none"),
)
PAIRS = [
    (family, name)
    for family, known in MULTIMODAL.items()
    for name in SCENES
    if known.kinds and (name != "videos" or "video" in known.kinds)
]
FAST = [("qwen3_vl", "tool tree")]


def weighted(outputs: Any, batch: Any) -> Tensor:
    return -batch.trained(outputs.logprobs * batch.advantages).sum()


def gradients_by_rollout(
    model: Any, batch: RolloutBatch, inputs: Callable[[Rollout], dict[str, Any]]
) -> dict[str, Tensor | None]:
    """Of `weighted`, by the model's own forward of one rollout at a time and its inputs."""
    clear_gradients(model)
    for one in batch:
        ids = torch.tensor(one.token_ids.astype(np.int64))[None]
        logits = model(input_ids=ids, use_cache=False, **inputs(one)).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        trained = torch.tensor(one.loss_mask[1:])
        (-one.advantage * chosen[trained].sum()).backward()
    found = gradients(model)
    clear_gradients(model)
    return found


def stock_gradients(model: Any, family: str, batch: RolloutBatch) -> dict[str, Tensor | None]:
    return gradients_by_rollout(model, batch, lambda one: stock_inputs(model, family, one))


def tower(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters outside of the language model and the head."""
    text = ("language_model.", "text_model.", "lm_head.")
    return {n: p for n, p in model.named_parameters() if not any(part in n for part in text)}


def step(policy: Any, batch: RolloutBatch, loss: Any = weighted) -> dict[str, Tensor | None]:
    clear_gradients(policy.host.model)
    policy.forward_backward(batch, loss)
    return gradients(policy.host.model)


@pytest.mark.parametrize(("family", "name"), slow_besides(FAST, PAIRS))
def test_equals_the_stock_forward(family: str, name: str) -> None:
    model, batch = tiny_multimodal(family), scene(name, family)
    with lifted_upcasts(model):
        policy = wrap(model)
        wanted = stock_gradients(model, family, batch)
        assert any(p is not None for n, p in wanted.items() if n in tower(model))
        dense = dense_run(model, batch, GSPO())
        for config in CONFIGS:
            policy = policy.with_config(**vars(config))
            assert relative_distance(step(policy, batch), wanted) < BAR, config
        assert relative_distance(step(policy, batch, GSPO()), dict(dense.gradients)) < BAR
        assert (policy.score(batch).logprobs - dense.per_token["logprobs"]).abs().max() < BAR


def test_each_image_is_encoded_once() -> None:
    model, batch = tiny_multimodal("qwen3_vl"), scene("group", "qwen3_vl")
    policy = wrap(model, Config(sharing="tree", boundary="across", max_microbatch_tokens=16))
    policy = policy.with_config(self_check=False)
    stats = policy.forward_backward(batch, GRPO())
    assert stats.events == stats.plan.events()
    assert stats.events[:4] == (
        "encode image 0",
        "forward prefix 0",
        "encode image 1",
        "forward prefix 1",
    )
    assert stats.events[-4:] == (
        "backward prefix 1",
        "encode backward image 1",
        "backward prefix 0",
        "encode backward image 0",
    )
    assert sum("encode" in event for event in stats.events) == 4
    scores = policy.score(batch).events
    assert scores == stats.plan.events(backward=False)
    assert [e for e in scores if "image" in e] == [
        "encode image 0",
        "release image 0",
        "encode image 1",
        "release image 1",
    ]


def frozen(model: Any, *parts: str, but: bool = False) -> None:
    """Freeze parameters with one of these in their names, or all others."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts) == but)


@pytest.mark.parametrize(
    ("parts", "but"),
    slow_besides_every(
        5,
        [
            (("visual.blocks", "visual.patch_embed", "visual.pos_embed"), False),
            (("visual",), False),
            (("visual",), True),
            (("embed_tokens",), False),
            (("visual.merger",), True),
        ],
    ),
)
def test_frozen_parts(parts: tuple[str, ...], but: bool) -> None:
    """Training projectors, no tower, the tower alone, all but embeddings, one projector."""
    model, batch = tiny_multimodal("qwen3_vl"), scene("tool tree", "qwen3_vl")
    frozen(model, *parts, but=but)
    with lifted_upcasts(model):
        wanted = stock_gradients(model, "qwen3_vl", batch)
        policy = wrap(model, ACROSS)
        for config in CONFIGS[:2]:
            assert relative_distance(step(policy.with_config(**vars(config)), batch), wanted) < BAR
    trains = any(p.requires_grad for p in tower(model).values())
    events = policy.plan(batch, GRPO()).events()
    assert any("encode backward" in event for event in events) == trains


def test_plans_are_of_frozen_or_trained_towers() -> None:
    model, batch = tiny_multimodal("qwen3_vl"), scene("group", "qwen3_vl")
    policy = wrap(model, ACROSS)
    plan = policy.plan(batch, GRPO())
    frozen(model, "visual")
    with pytest.raises(PlanError, match="encoder"):
        policy.forward_backward(batch, GRPO(), plan=plan)


# Faults
# ------------------------------------------------------------


def swapped_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two tokens of each image have each other's features."""
    own = engine_media._read

    def wrong(table: Tensor, total: Tensor | None, index: Tensor) -> Tensor:
        return own(table, total, torch.where(index < 2, 1 - index, index))

    monkeypatch.setattr(engine_media, "_read", wrong)


def dropped_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that microbatches leave for an encoder stay there."""
    monkeypatch.setattr(
        engine_media._Read, "backward", staticmethod(lambda ctx, grad: (None, None, None, None))
    )


def places_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions know no images."""
    monkeypatch.setattr("forkpoint.hosts.host.ModelHost.positions", lambda *_: None)


FAULTS = (swapped_rows, places_alone, dropped_gradient)


@pytest.mark.parametrize("fault", slow_besides([swapped_rows], FAULTS))
def test_faults_are_found(fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the comparison with stock, by the self-check if values of a sample show them, and by
    verify."""
    model, batch = tiny_multimodal("qwen3_vl"), scene("tool tree", "qwen3_vl")
    policy = wrap(model, ACROSS)
    with lifted_upcasts(model):
        wanted = stock_gradients(model, "qwen3_vl", batch)
        fault(monkeypatch)
        unchecked = policy.with_config(self_check=False)
        assert relative_distance(step(unchecked, batch), wanted) > 1e-3
    assert not unchecked.verify(batch, GRPO()).passed
    if fault is not dropped_gradient:
        with pytest.raises(UnsupportedError, match="differ from the model's"):
            policy.forward_backward(batch, GRPO())


# Refusals
# ------------------------------------------------------------


def trained(ids: list[int], media: list[Media], types: list[int]) -> list[Rollout]:
    mask = [0] * (len(ids) - 1) + [1]
    return [Rollout(ids, mask, 1.0, media=media, media_types=types)]


def pixels(family: str, **inputs: Any) -> Media:
    return Media("image", {**image(family).inputs, **inputs}, 4)


ONE, FOUR = image("qwen3_vl"), [IMAGE] * 4
EYE, GRID = np.eye(16, 96), np.array([[1, 4, 4]])
TILES = np.zeros((1, 2, 3, 16, 16))
REFUSED: dict[str, tuple[str, list[Rollout], str]] = {
    "text alone": ("glm4v", trained([3, *FOUR, 4], [ONE], [0, 1, 1, 1, 1, 0]), "text alone"),
    "both ways": ("gemma3", trained([3, *FOUR, 4], [ONE], [0, 1, 1, 1, 1, 0]), "both directions"),
    "both ways too": (
        "gemma4",
        trained([3, *FOUR, 4], [ONE], [0, 1, 1, 1, 1, 0]),
        "both directions",
    ),
    "input": (
        "qwen3_vl",
        trained([3, *FOUR, 4], [pixels("qwen3_vl", sizes=np.ones(1))], [0, 1, 1, 1, 1, 0]),
        "input 'sizes'",
    ),
    "neighbours": (
        "qwen3_vl",
        trained([3, *FOUR, *FOUR, 4], [ONE, ONE], [0, *[1] * 8, 0]),
        "without a token between",
    ),
    "sampled": (
        "qwen3_vl",
        trained([3, *FOUR, 4, IMAGE, 5], [ONE], [0, 1, 1, 1, 1, 0, 0, 0]),
        "at position 6 of rollout 0",
    ),
    "other tokens": (
        "qwen3_vl",
        trained([3, 7, 7, 7, 7, 4], [ONE], [0, 1, 1, 1, 1, 0]),
        "token 7 at position 1",
    ),
    "cut": (
        "qwen3_vl",
        trained([3, *FOUR[:3], 4], [Media("image", ONE.inputs, 3)], [0, 1, 1, 1, 0]),
        "whose product is 12: 4 patches",
    ),
    "types of other tokens": (
        "qwen3_vl",
        trained([3, *FOUR[:2], 7, *FOUR[2:], 4], [ONE], [0, 1, 1, 0, 1, 1, 0]),
        "no positions",
    ),
    **{
        name: (family, trained([3, *FOUR, 4], [medium], [0, 1, 1, 1, 1, 0]), message)
        for name, family, medium, message in (
            ("floats", "qwen3_vl", pixels("qwen3_vl", image_grid_thw=GRID / 1.0), "takes int64"),
            ("bytes", "qwen3_vl", pixels("qwen3_vl", image_grid_thw=GRID.astype("u1")), "uint8"),
            ("flat", "qwen3_vl", pixels("qwen3_vl", image_grid_thw=GRID[0]), r"int64 \[1, 4, 4\]"),
            ("rows", "qwen3_vl", pixels("qwen3_vl", pixel_values=np.ones((8, 96))), "has 8 rows"),
            ("no grid", "qwen3_vl", Media("image", {"pixel_values": EYE}, 4), "lacks the input"),
            ("no pixels", "qwen3_vl", Media("image", {"image_grid_thw": GRID}, 4), "lacks the"),
            ("columns", "qwen3_vl", pixels("qwen3_vl", pixel_values=EYE[:, :95]), "own code fails"),
            ("NaN", "internvl", pixels("internvl", pixel_values=EYE * np.nan), "NaN or infinite"),
            ("infinite", "internvl", pixels("internvl", pixel_values=EYE - np.inf), "infinite"),
            ("no rows", "internvl", pixels("internvl", pixel_values=np.ones(())), "dimensions"),
            ("shape", "internvl", pixels("internvl", pixel_values=EYE), r"pixel_values \[16, 96\]"),
            ("kwargs", "internvl", pixels("internvl", kwargs=np.ones(1)), "input 'kwargs'"),
            ("one", "mistral3", Media("image", image("mistral3").inputs, 4), "gives 16 features"),
        )
    },
    "tiles of zeros, which the model leaves out": (
        "smolvlm",
        trained(
            [3, *FOUR, *FOUR, 4],
            [Media("image", {"pixel_values": np.eye(2)[None, :, :1, None, None] + TILES}, 8)],
            [0, *[1] * 8, 0],
        ),
        "gives 4 features",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    family, rollouts, message = REFUSED[case]
    model = tiny_multimodal(family)
    with pytest.raises(UnsupportedError, match=message):
        wrap(model).forward_backward(rollouts, GRPO())
    assert all(p.grad is None for p in model.parameters())


def test_arrays_that_torch_does_not_take_as_they_are() -> None:
    """Read-only arrays, other byte orders and negative strides, in a batch of equal media."""
    inputs = image("qwen3_vl").inputs
    grid, values = inputs["image_grid_thw"], inputs["pixel_values"]
    backwards = np.ascontiguousarray(values[::-1])[::-1]
    values.flags.writeable = False
    policy = wrap(tiny_multimodal("qwen3_vl"))
    found = []
    for given in (values.copy(), values, values.astype(">f8"), backwards):
        medium = Media("image", {"pixel_values": given, "image_grid_thw": grid}, 4)
        found.append(policy.score(trained([3, *FOUR, 4], [medium], [0, 1, 1, 1, 1, 0])).logprobs)
    assert all(torch.equal(each, found[0]) for each in found)


def test_samples_of_short_videos() -> None:
    """A frame of a video of few tokens; its frames are apart in Qwen3-VL."""
    medium = video("qwen3_vl", frames=2)
    inputs = dict(medium.inputs, pixel_values_videos=medium.inputs["pixel_values_videos"][:16])
    inputs["video_grid_thw"] = np.array([[2, 4, 2]])
    short = Media("video", inputs, 4)
    batch = [rollout("qwen3_vl", [[3, 4], short, [5]], [[n, 6]], n - 4.5) for n in (4, 5)]
    wrap(tiny_multimodal("qwen3_vl")).forward_backward(batch, GRPO())  # checks itself


def test_towers_that_mix_or_draw_are_refused() -> None:
    batch = scene("group", "qwen3_vl")

    def refused(change: Callable[[Any], object], message: str) -> None:
        model = tiny_multimodal("qwen3_vl")
        change(model.model.visual)
        with pytest.raises(UnsupportedError, match=message):
            wrap(model).forward_backward(batch, GRPO())
        wrap(model.eval()).score(batch)

    norm = torch.nn.BatchNorm1d(3).double()
    refused(lambda visual: visual.add_module("extra", norm), "BatchNorm1d in training mode")
    refused(lambda visual: setattr(visual.blocks[0], "drop_path", 0.1), r"drop_path 0\.1")
    refused(lambda visual: setattr(visual.blocks[0].attn, "dropout", 0.1), r"dropout 0\.1")


@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_tokens_of_images_that_are_called_text(family: str) -> None:
    """As TRL trains rows whose images it has dropped; without media_types they are refused."""
    model, ids = tiny_multimodal(family), [[3, *FOUR, n, 6] for n in (4, 5)]
    bare = [Rollout(row, [0] * 5 + [1, 1], row[5] - 4.3) for row in ids]
    batch = RolloutBatch(bare).with_media([(), ()], [0] * 14)
    with lifted_upcasts(model):
        wanted = gradients_by_rollout(model, batch, lambda one: {})
        policy = wrap(model, ACROSS)
        assert relative_distance(step(policy, batch), wanted) < BAR
    assert policy.verify(batch, GRPO()).passed
    with pytest.raises(UnsupportedError, match="it stands for an image"):
        policy.forward_backward(bare, GRPO())
    text = [Rollout([1, 2, 7], [0, 0, 1], 1.0)]
    with pytest.raises(UnsupportedError, match="it stands for an image"):
        policy.forward_backward([*batch, *text], GRPO())


def test_models_of_text_refuse_media() -> None:
    with pytest.raises(UnsupportedError, match="media of kind 'image'"):
        wrap(tiny_model("qwen3")).forward_backward(scene("group", "qwen3_vl"), GRPO())


def test_rollouts_that_end_in_an_image() -> None:
    """It is not run by microbatches, since nothing is trained behind it; the tower gets zeros."""
    model = tiny_multimodal("qwen3_vl")
    one = rollout("qwen3_vl", [[3, 4]], [[5, 6], ONE], 1.0)
    batch = RolloutBatch([one, rollout("qwen3_vl", [[3, 4]], [[5, 7], video("qwen3_vl")], -0.5)])
    with lifted_upcasts(model):
        policy = wrap(model, ACROSS)
        wanted = stock_gradients(model, "qwen3_vl", batch)
        assert relative_distance(step(policy, batch), wanted) < BAR
    assert sum("encode" in event for event in policy.plan(batch, GRPO()).events()) == 2
    assert policy.verify(batch, GRPO()).passed


@pytest.mark.parametrize("parts", [(), ("language_model", "lm_head")])
def test_advantages_of_zero_give_the_tower_zeros(parts: tuple[str, ...]) -> None:
    """As ordinary training does, also beside a frozen language model: optimizers skip no weight."""
    model = tiny_multimodal("qwen3_vl")
    frozen(model, *parts)
    batch = RolloutBatch([rollout("qwen3_vl", [[3], ONE], [[n, 6]], 0.0) for n in (4, 5)])
    wanted = stock_gradients(model, "qwen3_vl", batch)
    policy = wrap(model, ACROSS)
    found = step(policy, batch, GRPO())
    assert all((found[n] is None) == (wanted[n] is None) for n in wanted)
    assert all(not found[n].any() for n in tower(model))  # type: ignore[union-attr]
    assert policy.plan(batch, GRPO()).events() == ("encode image 0", "encode backward image 0")
