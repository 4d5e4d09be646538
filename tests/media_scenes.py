"""Rollouts with images and videos for tiny multimodal models, as processors would make them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forkpoint import Media, Rollout, RolloutBatch
from multimodal_models import IMAGE, VIDEO

Part = Media | list[int]
"""Of a rollout: text, or a medium."""


def image(family: str, seed: int = 0, *, rows: int = 4, columns: int = 4) -> Media:
    """An image of the family, of patches in rows and columns where it takes any."""
    pixels = np.random.default_rng(seed).normal(size=(3, 16, 16))
    if family.startswith("qwen"):
        pixels = np.random.default_rng(seed).normal(size=(rows * columns, 96))
        inputs = {"pixel_values": pixels, "image_grid_thw": np.array([[1, rows, columns]])}
        return Media("image", inputs, rows * columns // 4)
    if family == "mistral3":
        height, width = 4 * rows, 4 * columns
        pixels = np.random.default_rng(seed).normal(size=(1, 3, height, width))
        inputs = {"pixel_values": pixels, "image_sizes": np.array([[height, width]])}
        return Media("image", inputs, rows * columns)
    if family == "smolvlm":  # two tiles
        pixels = np.random.default_rng(seed).normal(size=(1, 2, 3, 16, 16))
        return Media("image", {"pixel_values": pixels}, 8)
    tokens = {"llava": 16, "internvl": 4}[family]
    return Media("image", {"pixel_values": pixels[None]}, tokens)


def video(family: str, seed: int = 0, *, frames: int = 2) -> Media:
    """A video of the Qwen families, of 4 x 4 patches."""
    pixels = np.random.default_rng(100 + seed).normal(size=(frames * 16, 96))
    inputs = {"pixel_values_videos": pixels, "video_grid_thw": np.array([[frames, 4, 4]])}
    if family == "qwen2_5_vl":  # how many seconds a frame stands for
        inputs["second_per_grid_ts"] = np.array([2.0])
    return Media("video", inputs, frames * 4)


def rollout(
    family: str, prompt: Sequence[Part], response: list[Part], advantage: float, **fields: Any
) -> Rollout:
    """Text of the response is trained, and its media are results of tools."""
    ids: list[int] = []
    mask: list[int] = []
    types: list[int] = []
    media: list[Media] = []
    for number, part in enumerate([*prompt, *response]):
        if not isinstance(part, Media):
            ids += part
            mask += [int(number >= len(prompt))] * len(part)
            types += [0] * len(part)
            continue
        media.append(part)
        kind, token = (1, IMAGE) if part.kind == "image" else (2, VIDEO)
        # Qwen3-VL and Qwen3.5 have a timestamp before each frame.
        split = part.kind == "video" and not family.startswith("qwen2")
        frames = int(part.inputs["video_grid_thw"][0, 0]) if split else 1
        for frame in range(frames):
            begins = [7, 3 + frame] if split else []
            tokens = part.tokens // frames
            ids += [*begins, *[token] * tokens]
            mask += [0] * (len(begins) + tokens)
            types += [0] * len(begins) + [kind] * tokens
    return Rollout(
        ids, mask, advantage, media=media, media_types=types if media else None, **fields
    )


def texts(seed: int) -> Callable[[int], list[int]]:
    """Draws text of a length, without placeholders."""
    rng = np.random.default_rng(seed)
    return lambda length: rng.integers(8, 60, length).tolist()


def group(family: str, seed: int = 0) -> list[Rollout]:
    """One prompt of two images, and six responses, two of which begin alike."""
    text = texts(seed)
    prompt = [text(3), image(family, seed), text(4), image(family, seed + 1, columns=6), text(2)]
    begin = text(3)
    endings = [text(4), text(2), text(6), begin + text(2), begin + text(4), text(1)]
    return [
        rollout(family, prompt, [ending], 0.3 * n - 0.8, group_id=f"a{seed}")
        for n, ending in enumerate(endings)
    ]


def equal_tokens(family: str) -> list[Rollout]:
    """Two groups of the same tokens and different images, and one of text alone."""
    text = texts(5)
    before, after, endings = text(3), text(2), [text(4), text(3), text(5)]
    found = [
        rollout(family, [before, image(family, seed), after], [e], 0.4 * n - 0.5 + seed)
        for seed in (0, 1)
        for n, e in enumerate(endings)
    ]
    return [*found, rollout(family, [before, after], [endings[0]], 0.7)]


def tool_tree(family: str) -> list[Rollout]:
    """Trajectories that fork below results of tools with images."""
    text = texts(6)
    prompt = [text(4), image(family, 0), text(2)]
    shot, other = [text(2), image(family, 1), text(1)], [text(2), image(family, 2), text(1)]
    call = text(3)
    return [
        rollout(family, prompt, [call, *shot, text(4)], 1.0),
        rollout(family, prompt, [call, *shot, text(2), *other, text(3)], -0.6),
        rollout(family, prompt, [call, *other, text(4)], 0.4),
        rollout(family, prompt, [text(3)], -0.2),
    ]


def videos(family: str) -> list[Rollout]:
    """A video and an image in the prompt, a video in some responses."""
    text = texts(8)
    prompt = [text(3), video(family, 0), text(2), image(family, 3), text(2)]
    shot = [text(2), video(family, 1, frames=1), text(2)]
    responses: list[list[Part]] = [[text(4)], [text(2)], [text(2), *shot], [text(5)]]
    return [
        rollout(family, prompt, response, 0.5 * n - 0.7) for n, response in enumerate(responses)
    ]


SCENES: dict[str, Callable[[str], list[Rollout]]] = {
    "group": group,
    "equal tokens": equal_tokens,
    "tool tree": tool_tree,
    "videos": videos,
}


def scene(name: str, family: str) -> RolloutBatch:
    return RolloutBatch(SCENES[name](family))


def stock_inputs(model: Any, family: str, one: Rollout) -> dict[str, Tensor]:
    """Arguments that a processor gives with the ids of one rollout."""
    parts: dict[str, list[Tensor]] = {}
    for medium in one.media:
        for name, value in medium.inputs.items():
            parts.setdefault(name, []).append(torch.as_tensor(value))
    if family == "mistral3" and parts:
        largest = [max(x.shape[at] for x in parts["pixel_values"]) for at in (2, 3)]
        parts["pixel_values"] = [
            torch.nn.functional.pad(x, (0, largest[1] - x.shape[3], 0, largest[0] - x.shape[2]))
            for x in parts["pixel_values"]
        ]
    given = {name: torch.cat(each, int(family == "smolvlm")) for name, each in parts.items()}
    if family.startswith("qwen") and one.media_types is not None:
        given["mm_token_type_ids"] = torch.tensor(one.media_types.astype(np.int64))[None]
    return given
