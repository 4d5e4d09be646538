"""Images and videos in the arguments of transformers models, which trainers have concatenated."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.rollouts.media import Media, MediaKind

INPUTS: dict[MediaKind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
"""Names of the patches [patches, ...] and of the grids [media, 3], by kind."""
SECONDS = "second_per_grid_ts"
"""Argument with the seconds between frames of each video. Positions of Qwen2.5-VL depend on
them."""
Part = tuple[dict[str, Tensor], int]
"""Inputs of a medium or of a tile of an image, with a size to which the number of its tokens is
proportional."""


def media_parts(kind: MediaKind, given: dict[str, Any]) -> list[Part]:
    """Split the media of one kind from the arguments of a call."""
    name, grid = INPUTS[kind]
    if name not in given:
        return []
    pixels = given.pop(name)
    if grid in given:  # Qwen-VL: [patches, ...]
        by_medium = {grid: given.pop(grid)}
        if kind == "video" and SECONDS in given:
            by_medium[SECONDS] = torch.as_tensor(given.pop(SECONDS))
        ends = by_medium[grid].prod(1).cumsum(0).tolist()
        return [
            (
                {name: pixels[begin:end]} | {k: x[n : n + 1] for k, x in by_medium.items()},
                end - begin,
            )
            for n, (begin, end) in enumerate(pairwise([0, *ends]))
        ]
    sizes, shown = given.pop("image_sizes", None), given.pop("pixel_attention_mask", None)
    if sizes is not None:  # Mistral 3: [images, ...], padded to the largest
        each = zip(pixels.split(1), sizes.split(1), sizes.tolist(), strict=True)
        return [({name: x[..., :h, :w], "image_sizes": n}, h * w) for x, n, (h, w) in each]
    if pixels.ndim < 5:  # LLaVA, and tiles of InternVL
        return [({name: x}, 1) for x in pixels.split(1)]
    there = pixels.flatten(2).any(-1)  # SmolVLM: [B, tiles, ...], padded with zeros
    tiles = {name: pixels[there]}
    if shown is not None:
        tiles["pixel_attention_mask"] = shown[there]
    return [({k: x[n][None, None] for k, x in tiles.items()}, 1) for n in range(int(there.sum()))]


def media_of_rows(
    kind: MediaKind, parts: Sequence[Part], places_BW: Tensor
) -> tuple[tuple[Media, ...], ...]:
    """Media of each row, in the order of their tokens. `places_BW`: bool, True at these tokens.

    Raises UnsupportedError if the number of a medium's tokens is unknown.
    """
    counts_B, left = places_BW.sum(1).tolist(), list(parts)
    tokens, sizes = sum(counts_B), sum(size for _, size in parts)
    found: list[tuple[Media, ...]] = []
    count = 0
    for count in counts_B:
        row: list[Media] = []
        while count > 0 and left and left[0][1] * tokens % sizes == 0:
            inputs, size = left.pop(0)
            row.append(Media(kind, inputs, size * tokens // sizes))
            count -= row[-1].tokens
        found.append(tuple(row))
        if count:
            break
    if count or left:
        raise UnsupportedError(
            f"the trainer's rows have {tokens} tokens of {kind}s, and {len(parts)} {kind}s or "
            f"tiles of a size of {sizes} in all do not fill them. Leave out options that cut "
            f"prompts or completions with {kind}s."
        )
    return tuple(found)
