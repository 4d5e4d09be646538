"""Batches from padded tensors, from prompts and completions, and from jagged tensors.

Each function returns the attributes of a RolloutBatch by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch_tensors.cells import (
    IDS,
    WHO,
    Cells,
    FloatReader,
    Rows,
    dimensions,
    loss_mask_of,
    on_host,
    read_matrix,
    read_rows,
    refuse_first_tokens,
    shape_text,
    split_rows,
    token_ids_of,
)
from forkpoint.rollouts.batch_tensors.identifiers import (
    check_unique,
    fill_ids,
    group_index,
    groups_of_given_prompts,
    prompt_lengths,
    read_each,
    read_extras,
    read_ids,
)
from forkpoint.rollouts.batch_tensors.layout import NO_CELL, PaddedLayout
from forkpoint.rollouts.fields import named, read_temperature, read_vector, short

ATTENDED = "it takes 0 and 1, or booleans: 1 where there is a token, 0 where there is padding."
NO_ROLLOUTS = "There are no rollouts; a batch takes at least one."
Ids = ArrayLike | Sequence[str | int | None]
"""Ids of rollouts or groups, [N]."""


class BatchFields(TypedDict, total=False):
    """Fields that a batch made from tensors may have. One that is None is left out.

    Per-token fields are lists of rows, arrays or tensors of the shapes that the constructor names;
    the entry at a token belongs to it. The meaning and the limits of values are those of Rollout.
    """

    advantages: Any
    """Per token; or [N] or [N, 1], one number per rollout; or a single number for all. Without
    advantages `has_advantages` is False."""
    old_logprobs: Any
    """Per token."""
    reference_logprobs: Any
    """Per token."""
    weights: Any
    """Per token or per rollout, as advantages."""
    returns: Any
    """Per token or per rollout, as advantages."""
    old_values: Any
    """Per token."""
    temperatures: ArrayLike | None
    """[N], or a single number; 1 if left out."""
    group_ids: Ids | None
    """[N] texts or whole numbers. Rollouts without one form a group where their prompts are equal,
    a prompt being the tokens before the first trained one."""
    rollout_ids: Ids | None
    """[N] texts or whole numbers, all different; positions if left out."""
    extras: Sequence[dict[str, Any] | None] | None
    """N dicts or None."""


def read_padded(
    given: Mapping[str, Any], input_ids: Any, attention_mask: Any, loss_mask: Any
) -> dict[str, Any]:
    """See RolloutBatch.from_padded."""
    ids = _ids_matrix("input_ids", input_ids)
    names = _names(given, len(ids))
    cells = _cells_of_mask("input_ids", ids, "attention_mask", attention_mask, names)
    _refuse_empty(cells.lengths, cells, "attention_mask has no 1")
    token_ids = token_ids_of(cells, "input_ids", ids)
    mask = loss_mask_of(cells, "loss_mask", loss_mask)
    layout = PaddedLayout(ids.shape[1], cells.columns[:, None], cells.lengths[:, None])
    return _attributes(given, names, cells, token_ids, mask, layout, None)


def read_completions(
    given: Mapping[str, Any],
    prompt_ids: Any,
    prompt_mask: Any,
    completion_ids: Any,
    completion_mask: Any,
    loss_mask: Any,
    tool_mask: Any,
) -> dict[str, Any]:
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
    parts = (
        _cells_of_mask("prompt_ids", prompts, "prompt_mask", prompt_mask, names),
        _cells_of_mask("completion_ids", completions, "completion_mask", completion_mask, names),
    )
    lengths = np.stack([part.lengths for part in parts], axis=1)
    _refuse_empty(lengths.sum(axis=1), parts[0], "prompt_mask and completion_mask have no 1")
    token_ids = np.empty(lengths.sum(), np.int64)
    of_prompts = np.repeat(np.tile([True, False], len(names)), lengths.ravel())
    token_ids[of_prompts] = token_ids_of(parts[0], "prompt_ids", prompts)
    token_ids[~of_prompts] = token_ids_of(parts[1], "completion_ids", completions)
    cells = replace(
        parts[1],
        leading=lengths[:, 0],
        advice="Give fields over prompts and completions to RolloutBatch.from_padded.",
    )
    if loss_mask is not None and tool_mask is not None:
        raise RolloutError(
            f"{WHO}: both loss_mask and tool_mask are given. Give loss_mask alone, or TRL's "
            "tool_mask, which is read where completion_mask is 1."
        )
    if loss_mask is not None:
        mask = loss_mask_of(cells, "loss_mask", loss_mask)
    elif tool_mask is not None:
        mask = loss_mask_of(cells, "tool_mask", tool_mask, padding=True)
    else:
        mask = ~of_prompts
        refuse_first_tokens(cells, "completion_mask", mask)
    widths = prompts.shape[1], completions.shape[1]
    columns = np.stack([parts[0].columns, widths[0] + parts[1].columns], axis=1)
    layout = PaddedLayout(sum(widths), columns, lengths)
    of_completions = _without_prompts(widths[1], cells)
    return _attributes(given, names, cells, token_ids, mask, layout, of_completions)


def read_jagged(
    given: Mapping[str, Any], input_ids: Any, loss_mask: Any, offsets: Any, response_lengths: Any
) -> dict[str, Any]:
    """See RolloutBatch.from_jagged."""
    rows = _jagged_ids(input_ids, offsets)
    if not len(rows):
        raise RolloutError(NO_ROLLOUTS)
    names = _names(given, len(rows))
    lengths = np.array([len(row) for row in rows], np.int64)
    cells = Cells(
        whose=[named(name) for name in names],
        columns=np.zeros_like(lengths),
        lengths=lengths,
        leading=np.zeros_like(lengths),
        like="input_ids",
        advice="Where fields are over responses alone, give response_lengths.",
    )
    _refuse_empty(lengths, cells, "input_ids has no entry")
    token_ids = token_ids_of(cells, "input_ids", rows)
    layout, of_completions = PaddedLayout.of_lengths(lengths), None
    if response_lengths is not None:
        of_responses = _response_lengths(response_lengths, cells)
        cells = replace(
            cells,
            lengths=of_responses,
            leading=lengths - of_responses,
            like="response_lengths",
            advice="Without response_lengths, fields are over prompts and responses.",
        )
        of_completions = _without_prompts(int(of_responses.max()), cells)
    mask = loss_mask_of(cells, "loss_mask", loss_mask)
    return _attributes(given, names, cells, token_ids, mask, layout, of_completions)


def _attributes(
    given: Mapping[str, Any],
    names: tuple[str, ...],
    cells: Cells,
    token_ids: NDArray[np.int64],
    loss_mask: NDArray[np.bool_],
    layout: PaddedLayout,
    completion_layout: PaddedLayout | None,
) -> dict[str, Any]:
    """The attributes of a batch whose tokens and loss mask have been validated.

    Raises RolloutError for values of `given` that are not allowed.
    """
    if unknown := given.keys() - BatchFields.__annotations__.keys():
        takes = ", ".join(BatchFields.__annotations__)
        raise TypeError(f"A batch has no field {min(unknown)}; it takes {takes}.")
    count, offsets = len(names), cells.offsets
    reader = FloatReader(cells, loss_mask)
    advantages = reader.number_or_floats("advantages", given.get("advantages"))
    if advantages is None:
        reader.numbers["advantages"] = [0.0] * count
    group_ids = read_ids("group_ids", given.get("group_ids"), count)
    if completion_layout is None:
        groups = group_index(group_ids, token_ids, offsets, prompt_lengths(loss_mask, offsets))
    else:
        group_ids, groups = groups_of_given_prompts(
            group_ids, token_ids, loss_mask, offsets, cells.leading
        )
    takes = "a list of one dict or None per rollout."
    return {
        "token_ids": token_ids,
        "offsets": offsets,
        "loss_mask": loss_mask,
        "advantages": np.zeros(len(token_ids)) if advantages is None else advantages,
        "has_advantages": advantages is not None,
        **{
            name: reader.logprobs(name, given.get(name))
            for name in ("old_logprobs", "reference_logprobs")
        },
        **{name: reader.number_or_floats(name, given.get(name)) for name in ("weights", "returns")},
        "old_values": reader.floats("old_values", given.get("old_values")),
        "temperatures": _temperatures(cells, given.get("temperatures")),
        "group_index": groups,
        "group_ids": tuple(group_ids),
        "rollout_ids": names,
        "extras": tuple(read_each("extras", given.get("extras"), count, read_extras, takes)),
        "layout": layout,
        "completion_layout": completion_layout,
        "_numbers": reader.numbers,
    }


def _temperatures(cells: Cells, values: Any) -> NDArray[np.float64]:
    """The temperature of each rollout, float64 [N]: one number for all, or N; 1 for None."""
    count = len(cells.whose)
    values = on_host("temperatures", values)
    if values is None:
        return np.ones(count)
    if dimensions(values) == 0:
        return np.full(count, read_temperature(WHO, values))
    takes = f"it takes one number, or one per rollout, [{count}]."
    vector = read_vector(WHO, "temperatures", values, "iuf", takes)
    if len(vector) != count:
        raise RolloutError(f"{WHO}: temperatures has the shape {shape_text(vector.shape)}; {takes}")
    for who, temperature in zip(cells.whose, vector.tolist(), strict=True):
        read_temperature(who, temperature)
    return vector.astype(np.float64)


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


def _response_lengths(values: Any, cells: Cells) -> NDArray[np.int64]:
    takes = f"it takes one whole number per rollout, [{len(cells.whose)}]."
    given = read_vector(
        WHO, "response_lengths", on_host("response_lengths", values), "iu", takes
    ).astype(np.int64)
    if len(given) != len(cells.whose):
        raise RolloutError(
            f"{WHO}: response_lengths has the shape {shape_text(given.shape)}; {takes}"
        )
    refused = (given < 0) | (given > cells.lengths)
    if refused.any():
        n = int(refused.argmax())
        raise RolloutError(
            f"{cells.whose[n]}: response_lengths[{n}] is {given[n]}, and the rollout has "
            f"{cells.lengths[n]} tokens. Give the tokens of its response, those of tools included."
        )
    return given


def _names(given: Mapping[str, Any], count: int) -> tuple[str, ...]:
    rollout_ids = read_ids("rollout_ids", given.get("rollout_ids"), count)
    check_unique(rollout_ids, "a batch")
    return fill_ids(rollout_ids)


def _cells_of_mask(
    like: str, ids: np.ndarray, field: str, values: Any, names: tuple[str, ...]
) -> Cells:
    """The entries of `ids` [N, W] where the mask is 1, which are neighbours in each row."""
    matrix = read_matrix(field, on_host(field, values), "biuf", ATTENDED)
    if matrix.shape != ids.shape:
        raise RolloutError(
            f"{WHO}: {field} has the shape {shape_text(matrix.shape)}, but {like} has "
            f"{shape_text(ids.shape)}. The mask has one entry per entry of {like}."
        )
    mask = matrix.astype(np.bool_)
    firsts = lengths = np.zeros(len(ids), np.int64)
    if width := ids.shape[1]:
        lengths, firsts = np.count_nonzero(mask, axis=1), mask.argmax(axis=1)
    cells = Cells(
        whose=[named(name) for name in names],
        columns=firsts,
        lengths=lengths,
        leading=np.zeros_like(lengths),
        like=like,
        advice="Give fields over completions alone to RolloutBatch.from_completions.",
        width=width,
    )
    wrong = matrix != mask
    if wrong.any():
        n, column = divmod(int(wrong.argmax()), width)
        value = matrix[n, column]
        raise RolloutError(f"{cells.whose[n]}: {field}[{n}, {column}] is {value}; {ATTENDED}")
    holes = np.count_nonzero(mask[:, 1:] & ~mask[:, :-1], axis=1) + mask[:, :1].sum(axis=1) > 1
    if holes.any():
        n = int(holes.argmax())
        hole = int(firsts[n] + mask[n, firsts[n] :].argmin())
        raise RolloutError(
            f"{cells.whose[n]}: {field}[{n}, {hole}] is 0 between tokens, which go from column "
            f"{firsts[n]} to {np.flatnonzero(mask[n])[-1]}. Padding lies before or after the "
            "tokens of a row; mark tokens that are not trained in the loss mask."
        )
    return cells


def _refuse_empty(lengths: NDArray[np.int64], cells: Cells, problem: str) -> None:
    if not lengths.all():
        n = int(lengths.argmin())
        raise RolloutError(
            f"{cells.whose[n]}: {problem} in row {n}; a rollout has at least one token. Leave "
            "this rollout out."
        )


def _without_prompts(width: int, cells: Cells) -> PaddedLayout:
    """The layout of tensors [N, W] that have cells for completions alone."""
    prompts = np.full_like(cells.columns, NO_CELL)
    return PaddedLayout(
        width,
        np.stack([prompts, cells.columns], axis=1),
        np.stack([cells.leading, cells.lengths], axis=1),
    )
