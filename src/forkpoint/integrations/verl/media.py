"""Images and videos of verl's mini-batches: `multi_modal_inputs`, one dict a row."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.integrations.images import GRID, image_parts, images_of_rows
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import KINDS, Media, MediaKind

INPUTS: dict[MediaKind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
"""Names of the patches [patches, ...] and of the grids [media, 3], by kind."""
SECONDS = "second_per_grid_ts"
"""The seconds between frames of each video, which positions of Qwen2.5-VL depend on."""
UNREAD = ("images_seqlens", "mm_token_type_ids")
"""Other inputs of verl's rows, which models do not need."""


@dataclass(frozen=True)
class ModelOfRows:
    """Facts about the model that rows are read for.

    placeholders: the ids of tokens that stand for images and for videos, -1 where there is none.
    positions: `Host.positions`.
    """

    placeholders: tuple[int, ...]
    positions: Callable[[RolloutBatch], NDArray[np.int64] | None]

    @classmethod
    def of(cls, config: Any, positions: Any) -> "ModelOfRows":
        """Read the facts from a configuration of transformers."""
        ids = tuple(getattr(config, f"{kind}_token_id", None) for kind in KINDS)
        return cls(tuple(-1 if id is None else id for id in ids), positions)


def media_of_rows(
    data: Any, ids_T: Tensor, offsets: Tensor, placeholders: tuple[int, ...]
) -> tuple[list[tuple[Media, ...]] | None, Tensor]:
    """The images and videos of each row, None where no row has any; and the types of tokens.

    Args:
        ids_T: int64 [T], the tokens of all rows.
        offsets: int64 [N + 1], the starts of the rows, and T.
        placeholders: as in `ModelOfRows`.

    Returns the media, and int64 [T]: 0 for text, k for a token of one of `KINDS[k - 1]`.

    Raises UnsupportedError for inputs that are not known, and for media that do not fill their
    tokens.
    """
    types_T = torch.zeros_like(ids_T)
    if "multi_modal_inputs" not in data.keys():  # noqa: SIM118 - a TensorDict's `in` looks at values
        return None, types_T
    rows: list[Mapping[str, Any]] = []
    for one in data["multi_modal_inputs"]:
        given = getattr(one, "data", one) or {}
        rows.append({name: value for name, value in given.items() if value is not None})
    if not any(rows):
        return None, types_T
    media: list[tuple[Media, ...]] = []
    for number, row in enumerate(rows):
        begin, end = offsets[number : number + 2].tolist()
        types = types_T[begin:end]
        for kind, placeholder in enumerate(placeholders, 1):
            if row:  # placeholders of text rows are refused with those that were sampled
                types[ids_T[begin:end] == placeholder] = kind
        media.append(_media_of_row(row, types, number))
    return media, types_T


def _media_of_row(row: Mapping[str, Any], types: Tensor, number: int) -> tuple[Media, ...]:
    if "pixel_values" in row and GRID not in row:
        given = {name: value.cpu() for name, value in row.items() if name not in UNREAD}
        parts = image_parts(given)
        _check_inputs(given, frozenset(), number)
        return images_of_rows(parts, types[None])[0]
    known = {name for names in INPUTS.values() for name in names} | {SECONDS, *UNREAD}
    _check_inputs(row, known, number)
    patches: dict[MediaKind, list[int]] = {
        kind: row[grid].prod(1).tolist() for kind, (_, grid) in INPUTS.items() if grid in row
    }
    places = int((types > 0).sum())
    merged, rest = divmod(sum(map(sum, patches.values())), max(1, places))
    found: list[Media] = []
    for kind, sizes in patches.items():
        pixels, grids = (row[name].cpu() for name in INPUTS[kind])
        begin = 0
        for index, size in enumerate(sizes):
            if rest or not merged or size % merged:
                raise UnsupportedError(_unfilled(number, places, patches))
            names = INPUTS[kind]
            inputs = {names[0]: pixels[begin : begin + size], names[1]: grids[index : index + 1]}
            if kind == "video" and SECONDS in row:
                inputs[SECONDS] = torch.as_tensor(row[SECONDS])[index : index + 1]
            found.append(Media(kind, inputs, size // merged))
            begin += size
    for place, kind in enumerate(KINDS, 1):
        tokens = sum(medium.tokens for medium in found if medium.kind == kind)
        if tokens != int((types == place).sum()):
            raise UnsupportedError(_unfilled(number, places, patches))
    return tuple(found)


def _check_inputs(row: Mapping[str, Any], known: Collection[str], number: int) -> None:
    if strange := sorted(row.keys() - set(known)):
        raise UnsupportedError(
            f"row {number} of a mini-batch has the input {strange[0]!r} in multi_modal_inputs, "
            "which forkpoint's engine does not know. Train on a dataset without images, or with "
            "verl's own engine."
        )


def _unfilled(number: int, places: int, patches: Mapping[MediaKind, list[int]]) -> str:
    counted = ", ".join(f"{len(sizes)} {kind}s" for kind, sizes in patches.items()) or "no media"
    return (
        f"row {number} of a mini-batch has {places} tokens of images and videos, and {counted} of "
        f"{sum(map(sum, patches.values()))} patches do not fill them. Raise the limits of prompts "
        "and responses that cut images."
    )
