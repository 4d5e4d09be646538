"""Images among the arguments of models of transformers, split as trainers have joined them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.rollouts.media import Media

GRID = "image_grid_thw"


def image_parts(given: dict[str, Any]) -> list[tuple[dict[str, Tensor], int]]:
    """The inputs of each image, or of each of its tiles, taken out of a call's arguments, and a
    size that its number of tokens is proportional to."""
    pixels, grids = given.pop("pixel_values"), given.pop(GRID, None)
    sizes, shown = given.pop("image_sizes", None), given.pop("pixel_attention_mask", None)
    if grids is not None:  # Qwen-VL: [patches, ...]
        counts = grids.prod(1).tolist()
        each = zip(pixels.split(counts), grids.split(1), counts, strict=True)
        return [({"pixel_values": x, GRID: grid}, count) for x, grid, count in each]
    if sizes is not None:  # Mistral 3: [images, ...], as large as the largest
        each = zip(pixels.split(1), sizes.split(1), sizes.tolist(), strict=True)
        return [
            ({"pixel_values": x[..., :h, :w], "image_sizes": n}, h * w) for x, n, (h, w) in each
        ]
    if pixels.ndim < 5:  # LLaVA, and tiles of InternVL
        return [({"pixel_values": x}, 1) for x in pixels.split(1)]
    there = pixels.flatten(2).any(-1)  # SmolVLM: [B, tiles, ...], filled up with zeros
    tiles = {"pixel_values": pixels[there]}
    if shown is not None:
        tiles["pixel_attention_mask"] = shown[there]
    return [({k: x[n][None, None] for k, x in tiles.items()}, 1) for n in range(int(there.sum()))]


def images_of_rows(
    parts: Sequence[tuple[dict[str, Tensor], int]], types_BW: Tensor
) -> tuple[tuple[Media, ...], ...]:
    """The images of each row, in the order of their tokens.

    Raises UnsupportedError where an image's tokens are not known.
    """
    counts_B, left = (types_BW == 1).sum(1).tolist(), list(parts)
    tokens, sizes = sum(counts_B), sum(size for _, size in parts)
    found: list[tuple[Media, ...]] = []
    count = 0
    for count in counts_B:
        row: list[Media] = []
        while count > 0 and left and left[0][1] * tokens % sizes == 0:
            inputs, size = left.pop(0)
            row.append(Media("image", inputs, size * tokens // sizes))
            count -= row[-1].tokens
        found.append(tuple(row))
        if count:
            break
    if count or left:
        raise UnsupportedError(
            f"the trainer's rows have {tokens} tokens of images, and {len(parts)} images or tiles "
            f"of a size of {sizes} in all do not fill them. Leave out options that cut prompts or "
            "completions with images."
        )
    return tuple(found)
