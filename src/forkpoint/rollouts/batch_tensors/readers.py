"""The columns of a batch from padded tensors, prompts and completions, and jagged tensors."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch_tensors.cells import Cells
from forkpoint.rollouts.batch_tensors.columns import Columns, Fields, make_columns
from forkpoint.rollouts.batch_tensors.identifiers import check_unique, fill_ids, read_ids
from forkpoint.rollouts.batch_tensors.layout import NO_CELL, PaddedLayout
from forkpoint.rollouts.batch_tensors.rows import (
    WHO,
    Rows,
    dimensions,
    on_host,
    read_matrix,
    read_rows,
    shape_text,
    split_rows,
)
from forkpoint.rollouts.fields import (
    MAX_TOKEN_ID,
    Locate,
    Place,
    check_first_tokens,
    check_mask,
    check_token_ids,
    named,
    read_vector,
    short,
)

IDS = f"whole numbers from 0 to {MAX_TOKEN_ID}, the ids that the model read"
ZEROS_AND_ONES = "0 and 1, or booleans: 1 where the token is trained"
ATTENDED = "it takes 0 and 1, or booleans: 1 where there is a token, 0 where there is padding."
NO_ROLLOUTS = "There are no rollouts; a batch takes at least one."


def read_padded(input_ids: Any, attention_mask: Any, loss_mask: Any, given: Fields) -> Columns:
    """See RolloutBatch.from_padded."""
    ids = _ids_matrix("input_ids", input_ids)
    names = _names(given, len(ids))
    columns, lengths = _runs("attention_mask", attention_mask, "input_ids", ids, names)
    _refuse_empty(lengths, names, "attention_mask has no 1")
    cells = Cells(
        names=names,
        columns=columns,
        lengths=lengths,
        leading=np.zeros_like(lengths),
        width=ids.shape[1],
        like="input_ids",
        advice="Give fields over completions alone to RolloutBatch.from_completions.",
    )
    token_ids = _checked_ids("input_ids", cells.gather(ids), cells.locate)
    mask = _loss_mask(cells, "loss_mask", loss_mask)
    layout = PaddedLayout(ids.shape[1], columns[:, None], lengths[:, None])
    return make_columns(cells, token_ids, mask, given, layout, None)


def read_completions(
    prompt_ids: Any,
    prompt_mask: Any,
    completion_ids: Any,
    completion_mask: Any,
    loss_mask: Any,
    tool_mask: Any,
    given: Fields,
) -> Columns:
    """See RolloutBatch.from_completions."""
    prompts = _ids_matrix("prompt_ids", prompt_ids)
    completions = _ids_matrix("completion_ids", completion_ids)
    if len(prompts) != len(completions):
        raise RolloutError(
            f"{WHO}: prompt_ids has the shape {shape_text(prompts.shape)}, but completion_ids has "
            f"{shape_text(completions.shape)}. Both have one row per rollout: repeat a prompt for "
            "each of its completions."
        )
    names = _names(given, len(prompts))
    of_prompts = _runs("prompt_mask", prompt_mask, "prompt_ids", prompts, names)
    of_completions = _runs("completion_mask", completion_mask, "completion_ids", completions, names)
    columns = np.stack([of_prompts[0], of_completions[0]], axis=1)
    lengths = np.stack([of_prompts[1], of_completions[1]], axis=1)
    _refuse_empty(lengths.sum(axis=1), names, "prompt_mask and completion_mask have no 1")
    cells = Cells(
        names=names,
        columns=columns[:, 1],
        lengths=lengths[:, 1],
        leading=lengths[:, 0],
        width=completions.shape[1],
        like="completion_ids",
        advice="Give fields over prompts and completions to RolloutBatch.from_padded.",
    )
    flat_ids = _interleaved((prompts, completions), columns, lengths)

    def locate(position: int) -> Place:
        n, column, token = cells.entry(position)
        if token < lengths[n, 0]:
            return Place(named(names[n]), f"prompt_ids[{n}, {columns[n, 0] + token}]", token)
        return Place(named(names[n]), f"completion_ids[{n}, {column}]", token)

    token_ids = _checked_ids("", flat_ids, locate)
    if loss_mask is not None and tool_mask is not None:
        raise RolloutError(
            f"{WHO}: both loss_mask and tool_mask are given. Give loss_mask alone, or TRL's "
            "tool_mask, which is read where completion_mask is 1."
        )
    if loss_mask is None and tool_mask is None:
        mask = cells.gather(np.ones(completions.shape, np.bool_))
        check_first_tokens("completion_mask", mask, cells.offsets[:-1], cells.locate)
    elif loss_mask is None:
        mask = _loss_mask(cells, "tool_mask", tool_mask, padding=False)
    else:
        mask = _loss_mask(cells, "loss_mask", loss_mask)
    widths = prompts.shape[1], completions.shape[1]
    layout = PaddedLayout(sum(widths), columns + np.array([0, widths[0]]), lengths)
    return make_columns(cells, token_ids, mask, given, layout, _without_prompts(widths[1], cells))


def read_jagged(
    input_ids: Any, loss_mask: Any, offsets: Any, response_lengths: Any, given: Fields
) -> Columns:
    """See RolloutBatch.from_jagged."""
    rows = _jagged_ids(input_ids, offsets)
    if not len(rows):
        raise RolloutError(NO_ROLLOUTS)
    names = _names(given, len(rows))
    lengths = np.array([len(row) for row in rows], np.int64)
    _refuse_empty(lengths, names, "input_ids has no entry")
    whole = Cells(
        names=names,
        columns=np.zeros_like(lengths),
        lengths=lengths,
        leading=np.zeros_like(lengths),
        width=None,
        like="input_ids",
        advice="Where fields are over responses alone, give response_lengths.",
    )
    token_ids = _checked_ids("input_ids", whole.gather(rows, _whole_dtype(rows)), whole.locate)
    layout = PaddedLayout.of_lengths(lengths)
    if response_lengths is None:
        mask = _loss_mask(whole, "loss_mask", loss_mask)
        return make_columns(whole, token_ids, mask, given, layout, None)
    of_responses = _response_lengths(response_lengths, lengths, names)
    cells = replace(
        whole,
        lengths=of_responses,
        leading=lengths - of_responses,
        like="response_lengths",
        advice="Without response_lengths, fields are over prompts and responses.",
    )
    mask = _loss_mask(cells, "loss_mask", loss_mask)
    responses = _without_prompts(int(of_responses.max()), cells)
    return make_columns(cells, token_ids, mask, given, layout, responses)


def _ids_matrix(field: str, values: Any) -> np.ndarray:
    takes = f"it takes {IDS}, padded to [N, W], one row per rollout."
    ids = read_matrix(field, on_host(field, values), "iu", takes)
    if not len(ids):
        raise RolloutError(NO_ROLLOUTS)
    return ids


def _jagged_ids(values: Any, offsets: Any) -> Rows:
    """The rows of ids, of a nested tensor, a list of rows, or flat values with offsets."""
    takes = (
        f"it takes {IDS}, as a nested tensor, a list of rows, or flat values [T] together with "
        "offsets [N + 1]."
    )
    values = on_host("input_ids", values)
    if isinstance(values, (list, tuple)) and not values:
        raise RolloutError(NO_ROLLOUTS)
    flat = dimensions(values) == 1
    if offsets is None:
        if flat:
            raise RolloutError(f"{WHO}: input_ids is flat, and offsets are not given; {takes}")
        return read_rows("input_ids", values, "iu", takes)
    if not flat:
        raise RolloutError(f"{WHO}: offsets are given, and input_ids has rows of its own; {takes}")
    ids = read_vector(WHO, "input_ids", values, "iu", takes)
    bounds = read_vector(
        WHO, "offsets", on_host("offsets", offsets), "iu", "it takes N + 1 whole numbers."
    ).astype(np.int64)
    ends = (0, len(ids)) if not len(bounds) else (int(bounds[0]), int(bounds[-1]))
    if not len(bounds) or ends != (0, len(ids)) or (np.diff(bounds) < 0).any():
        raise RolloutError(
            f"{WHO}: offsets is {short(bounds.tolist())}; it takes the starts of the rollouts in "
            f"input_ids and its length, ascending from 0 to {len(ids)}."
        )
    return split_rows(ids, bounds)


def _whole_dtype(rows: Rows) -> np.dtype:
    """A dtype for the integers of all rows; those beyond int64 may wrap, and are refused."""
    dtype = np.result_type(*{row.dtype for row in rows})
    return dtype if dtype.kind in "iu" else np.dtype(np.int64)


def _checked_ids(field: str, ids: np.ndarray, locate: Locate) -> NDArray[np.int64]:
    check_token_ids(field, ids, locate, f"it takes {IDS}.")
    return ids.astype(np.int64, copy=False)


def _response_lengths(
    values: Any, lengths: NDArray[np.int64], names: tuple[str, ...]
) -> NDArray[np.int64]:
    takes = f"it takes one whole number per rollout, [{len(names)}]."
    given = read_vector(
        WHO, "response_lengths", on_host("response_lengths", values), "iu", takes
    ).astype(np.int64)
    if len(given) != len(names):
        raise RolloutError(
            f"{WHO}: response_lengths has the shape {shape_text(given.shape)}; {takes}"
        )
    refused = (given < 0) | (given > lengths)
    if refused.any():
        n = int(refused.argmax())
        raise RolloutError(
            f"{named(names[n])}: response_lengths[{n}] is {given[n]}, and the rollout has "
            f"{lengths[n]} tokens. Give the tokens of its response, those of tools included."
        )
    return given


def _names(given: Fields, count: int) -> tuple[str, ...]:
    rollout_ids = read_ids("rollout_ids", given.rollout_ids, count)
    check_unique(rollout_ids, "a batch")
    return fill_ids(rollout_ids)


def _runs(
    field: str, values: Any, like: str, ids: np.ndarray, names: tuple[str, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first column and the number of the entries that are 1, which are neighbours: [N] each.

    The first column of a row without any is 0.
    """
    matrix = read_matrix(field, on_host(field, values), "biuf", ATTENDED)
    if matrix.shape != ids.shape:
        raise RolloutError(
            f"{WHO}: {field} has the shape {shape_text(matrix.shape)}, but {like} has "
            f"{shape_text(ids.shape)}. The mask has one entry per entry of {like}."
        )
    width = ids.shape[1]

    def locate(position: int) -> Place:
        n, column = divmod(position, width)
        return Place(named(names[n]), f"[{n}, {column}]", column)

    mask = check_mask(field, matrix.ravel(), locate, ATTENDED).reshape(ids.shape)
    if not width:
        return np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
    lengths = np.count_nonzero(mask, axis=1)
    firsts = mask.argmax(axis=1)
    last = width - 1 - mask[:, ::-1].argmax(axis=1)
    holes = (lengths > 0) & (last - firsts + 1 != lengths)
    if holes.any():
        n = int(holes.argmax())
        hole = int(firsts[n] + mask[n, firsts[n] :].argmin())
        raise RolloutError(
            f"{named(names[n])}: {field}[{n}, {hole}] is 0 between tokens, which go from column "
            f"{firsts[n]} to {last[n]}. Padding lies before or after the tokens of a row; mark "
            "tokens that are not trained in the loss mask."
        )
    return firsts, lengths


def _refuse_empty(lengths: NDArray[np.int64], names: tuple[str, ...], problem: str) -> None:
    if not lengths.all():
        n = int(lengths.argmin())
        raise RolloutError(
            f"{named(names[n])}: {problem} in row {n}; a rollout has at least one token. Leave "
            "this rollout out."
        )


def _loss_mask(cells: Cells, field: str, values: Any, *, padding: bool = True) -> NDArray[np.bool_]:
    """The loss mask, bool [T]; with `padding`, ones where there is no token are refused."""
    takes = f"it takes {ZEROS_AND_ONES}, {cells.takes}."
    given = on_host(field, values)
    rows = cells.rows(field, given, "biuf", takes, missing=False)
    flat = cells.gather(rows)
    mask = check_mask(field, flat, cells.locate, takes)
    if padding and isinstance(rows, np.ndarray) and cells.width is not None:
        _refuse_trained_padding(cells, field, rows, int(np.count_nonzero(mask)))
    check_first_tokens(field, mask, cells.offsets[:-1], cells.locate)
    return mask


def _refuse_trained_padding(cells: Cells, field: str, rows: np.ndarray, inside: int) -> None:
    if np.count_nonzero(rows) == inside:
        return
    columns = np.arange(rows.shape[1])
    ends = cells.columns + cells.lengths
    padding = (columns < cells.columns[:, None]) | (columns >= ends[:, None])
    n, column = divmod(int((padding & (rows != 0)).argmax()), rows.shape[1])
    raise RolloutError(
        f"{named(cells.names[n])}: {field}[{n}, {column}] is {rows[n, column]}, where there is "
        f"padding: the tokens of row {n} go from column {cells.columns[n]} to {ends[n] - 1}. Set "
        "it to 0, or multiply the loss mask with the attention mask."
    )


def _interleaved(
    parts: tuple[np.ndarray, np.ndarray], columns: NDArray[np.int64], lengths: NDArray[np.int64]
) -> np.ndarray:
    """Of each row the run of the first part, then that of the second, back to back: [T]."""
    ends = (columns + lengths).tolist()
    pieces = []
    for n, begins in enumerate(columns.tolist()):
        for part, begin, end in zip(parts, begins, ends[n], strict=True):
            pieces.append(part[n, begin:end])
    return np.concatenate(pieces, dtype=_whole_dtype(parts), casting="same_kind")


def _without_prompts(width: int, cells: Cells) -> PaddedLayout:
    """The layout of tensors [N, W] that have cells for completions alone."""
    prompts = np.full_like(cells.columns, NO_CELL)
    return PaddedLayout(
        width,
        np.stack([prompts, cells.columns], axis=1),
        np.stack([cells.leading, cells.lengths], axis=1),
    )
