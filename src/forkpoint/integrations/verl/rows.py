"""Conversion of verl's mini-batches to rollouts, and of values of tokens to verl's shapes.

Images and videos are in `multi_modal_inputs`, one dict for each row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import RolloutError, UnsupportedError
from forkpoint.integrations import images
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import KINDS, Media

UNREAD = ("images_seqlens", "mm_token_type_ids")
"""Other inputs of verl's rows, which models do not need."""


def placeholders_of(config: Any) -> tuple[int, ...]:
    """Ids of the placeholder tokens of a model's images and videos; -1 if there is none."""
    ids = (getattr(config, f"{kind}_token_id", None) for kind in KINDS)
    return tuple(-1 if id is None else id for id in ids)


def media_of_rows(
    data: Any, ids_T: Tensor, offsets: Tensor, placeholders: tuple[int, ...]
) -> tuple[list[tuple[Media, ...]] | None, Tensor]:
    """Images and videos of each row (None if no row has any), and types of tokens.

    Args:
        ids_T: int64 [T], the tokens of all rows.
        offsets: int64 [N + 1], the starts of the rows, and T.
        placeholders: as of `placeholders_of`.

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
            if row:  # placeholders in rows of text are refused together with sampled ones
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


@dataclass(frozen=True, eq=False)
class Rows:
    """The N rollouts of a mini-batch, with T tokens.

    batch: the rollouts. All tokens of a response are trained, including tool tokens, which verl's
        masks hide. Without responses, as in supervised fine-tuning, the loss mask decides.
    offsets: int64 [N + 1] on the CPU; the starts of the rows and T.
    responses: int64 [R] on the CPU; positions in [T] of the tokens of responses. None without
        responses.
    """

    batch: RolloutBatch
    offsets: Tensor
    responses: Tensor | None

    @classmethod
    def of(
        cls,
        data: Any,
        placeholders: tuple[int, ...],
        positions_of: Callable[[RolloutBatch], NDArray[np.int64] | None],
        *,
        values: bool,
    ) -> "Rows":
        """The rows of a TensorDict without padding, as verl gives its engines.

        Args:
            data: verl's mini-batch.
            placeholders: as of `placeholders_of`.
            positions_of: `Host.positions`.
            values: whether the model is a critic, which uses no temperature.

        Raises:
            UnsupportedError: positions are not those of the model, or images do not fit the tokens.
            RolloutError: a value is not allowed in a rollout.
        """
        input_ids = data["input_ids"]
        offsets = input_ids.offsets().cpu().long()
        ids = input_ids.values().cpu()
        lengths = offsets.diff()
        media, types = media_of_rows(data, ids, offsets, placeholders)
        responses = None
        if "responses" in data.keys():  # noqa: SIM118 - a TensorDict's `in` looks at its values
            counts = response_lengths(data).cpu().long()
            if bool((counts >= lengths).any()):
                row = int((counts >= lengths).int().argmax())
                raise RolloutError(
                    f"row {row} of a mini-batch has {int(counts[row])} tokens of a response among "
                    f"{int(lengths[row])}, so its prompt is empty. Give each row a prompt of at "
                    "least one token."
                )
            starts = offsets[1:] - counts
            mask = torch.arange(len(ids)) >= starts.repeat_interleave(lengths)
            responses = mask.nonzero().squeeze(1)
        else:
            mask = data["loss_mask"].values().cpu().bool()
        # verl's masks hide images in results of tools.
        mask &= types == 0
        batch = RolloutBatch.from_jagged(
            ids.split(lengths.tolist()),
            mask.split(lengths.tolist()),
            temperatures=None if values else _temperatures(data, len(lengths)),
        )
        if media is not None:
            batch = batch.with_media(media, types)
        positions = None if media is None else positions_of(batch)
        _check_positions(data["position_ids"], offsets, positions)
        return cls(batch, offsets, responses)

    def tokens(self, values: Tensor) -> Tensor:
        """A per-token field of the responses, padded [N, C] or nested, over all tokens: [T].

        It is 0 at other tokens.
        """
        assert self.responses is not None
        found = torch.zeros(int(self.offsets[-1]), dtype=torch.float32, device=values.device)
        if values.is_nested:
            flat = values.values()
        else:
            rows = torch.searchsorted(self.offsets, self.responses, right=True) - 1
            counts = torch.bincount(rows, minlength=len(self.offsets) - 1)
            places = torch.arange(values.shape[1])
            flat = values[(places < counts[:, None]).to(values.device)]
        return found.index_put_((self.responses.to(values.device),), flat.float())

    @cached_property
    def _after(self) -> Tensor:
        end = int(self.offsets[-1])
        after = torch.arange(1, end + 1)
        after[self.offsets[1:] - 1] = end
        return after

    def shifted(self, rows: Sequence[int]) -> Tensor:
        """Position in [T] of the next token, for each of the concatenated tokens of these rows:
        int64.

        It is T for the last token of a row.
        """
        return torch.cat([self._after[self.offsets[r] : self.offsets[r + 1]] for r in rows])


def jagged(values_T: Tensor, after: Tensor, offsets: Tensor) -> Tensor:
    """Move values of tokens to the token before, as in verl, with their graph.

    Args:
        values_T: [T], values of all tokens.
        after: int64, the result of `Rows.shifted`.
        offsets: int64 [n + 1], the starts of the rows in the result.

    Returns:
        A nested tensor [n, j]; 0 at last tokens, which verl does not read.
    """
    padded = torch.cat([values_T, values_T.new_zeros(1)])
    return torch.nested.nested_tensor_from_jagged(padded.index_select(0, after), offsets)


def response_lengths(data: Any) -> Tensor:
    """Number of tokens of each row's response, with those of tools: int64 [N]."""
    prompts, responses = data["prompts"], data["responses"]
    if responses.is_nested:
        return responses.offsets().diff()
    return data["attention_mask"][:, prompts.shape[1] :].sum(1)


def _check_positions(
    position_ids: Tensor, offsets: Tensor, positions_AT: NDArray[np.int64] | None
) -> None:
    """Raise UnsupportedError unless positions are those of the model for its images or, without
    `positions_AT`, count the tokens of each row, on every axis."""
    if positions_AT is None:
        what = "count the tokens of each row from 0"
        lengths = offsets.diff()
        wanted = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
    else:
        what = "have the values of the model's own get_rope_index"
        wanted = torch.from_numpy(positions_AT)
    found = position_ids.values().cpu()  # [T], or [axes, T]
    fits = found.shape == wanted.shape or (positions_AT is None and found.ndim == 2)
    if not fits or found.shape[-1] != wanted.shape[-1] or bool((found != wanted).any()):
        raise UnsupportedError(
            f"position_ids of shape {tuple(found.shape)} do not {what}; forkpoint takes no others. "
            "Leave position_ids to verl."
        )


def _temperatures(data: Any, count: int) -> np.ndarray:
    """Temperature of each row: float64 [N]. verl has one for all rows, or one for each."""
    given = data["temperature"]
    if isinstance(given, Tensor):
        return given.detach().cpu().double().numpy().reshape(count)
    return np.full(count, float(given))
