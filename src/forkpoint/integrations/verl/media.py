"""Images and videos of verl's mini-batches: `multi_modal_inputs`, one dict a row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.integrations import images
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import KINDS, Media

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
    given = {n: torch.as_tensor(x).cpu() for n, x in row.items() if n not in UNREAD}
    found: list[Media] = []
    for place, kind in enumerate(KINDS, 1):
        (own,) = images.media_of_rows(kind, images.media_parts(kind, given), types[None] == place)
        found += own
    if given:
        raise UnsupportedError(
            f"row {number} of a mini-batch has the input {min(given)!r} in multi_modal_inputs, "
            "which forkpoint's engine does not know. Train on a dataset without images, or with "
            "verl's own engine."
        )
    return tuple(found)
