"""Rollouts from rows of padded tensors, from prompts with completions, and from jagged tensors."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.fields import (
    host_values,
    named,
    read_identifier,
    read_mask,
    read_vector,
    short,
)
from forkpoint.rollouts.groups import check_unique, fill_ids, group_of
from forkpoint.rollouts.layout import NO_CELL, PaddedLayout
from forkpoint.rollouts.rollout import IDS, Rollout

_WHO = "The batch"
_PER_ROLLOUT = {"temperatures": "temperature", "group_ids": "group_id", "extras": "extras"}
_EITHER = {"advantages": "advantage", "weights": "weights", "returns": "returns"}
_PER_TOKEN = ("old_logprobs", "reference_logprobs", "old_values")
Ids = ArrayLike | Sequence[str | int | None]
"""Ids of rollouts or groups, [N]."""
Row = Any
"""The entries of one rollout: a one-dimensional array, a list or a tuple."""


class BatchFields(TypedDict, total=False):
    """Optional fields of a batch that is made from tensors. A field that is None is left out.

    Per-token fields are lists of rows, arrays or tensors of the shapes that the constructor names.
    Entry i of a row belongs to token i. Meaning and limits of values are those of Rollout.
    """

    advantages: Any
    """One number per token, one per rollout ([N] or [N, 1]), or one for all. Without advantages,
    `has_advantages` is False."""
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
    """[N] texts or whole numbers. Rollouts without one form a group if their prompts are equal. A
    prompt is the tokens before the first trained token."""
    rollout_ids: Ids | None
    """[N] texts or whole numbers, all different; positions if left out."""
    extras: Sequence[dict[str, Any] | None] | None
    """N dicts or None."""


@dataclass(frozen=True)
class Made:
    """Rollouts, and the cells of the tensors that they were made from."""

    rollouts: list[Rollout]
    layout: PaddedLayout
    completion_layout: PaddedLayout | None
    has_advantages: bool


@dataclass(frozen=True)
class _Entries:
    """Entries of rows that belong to tokens: `starts[n] : stops[n]` of row n.

    like: name of the field with these rows.
    rows: the rows of that field, as arrays.
    """

    like: str
    rows: list[np.ndarray]
    starts: list[int]
    stops: list[int]

    def of(self, field: str, values: Any, *, may_exceed: bool = True) -> list[Row]:
        """The entries of another field with rows of equal lengths.

        Without `may_exceed`, other entries must be 0.
        """
        rows = _rows(field, values)
        if len(rows) != len(self.rows):
            raise RolloutError(
                f"{_WHO}: {field} has {len(rows)} rows, but {self.like} has {len(self.rows)}. Give "
                "one row per rollout."
            )
        found = []
        for n, (row, start, stop) in enumerate(zip(rows, self.starts, self.stops, strict=True)):
            if len(row) != len(self.rows[n]):
                raise RolloutError(
                    f"{_WHO}: {field} has {len(row)} entries in row {n}, but {self.like} has "
                    f"{len(self.rows[n])}. Give one entry per token. For fields of responses only, "
                    "use from_completions, or from_jagged with response_lengths."
                )
            if not may_exceed:
                array = row if isinstance(row, np.ndarray) else np.asarray(row, object)
                on = np.flatnonzero(array != 0)
                outside = on[(on < start) | (on >= stop)]
                if outside.size:
                    raise RolloutError(
                        f"{_WHO}: {field}[{n}, {outside[0]}] is {short(row[outside[0]])}, where "
                        "there is padding. Set it to 0, or multiply it with the attention mask."
                    )
            found.append(row[start:stop])
        return found

    @property
    def ids(self) -> list[np.ndarray]:
        bounds = zip(self.rows, self.starts, self.stops, strict=True)
        return [row[start:stop] for row, start, stop in bounds]

    def columns(self, first: int = 0) -> list[NDArray[np.int64]]:
        """The columns of the tokens of each rollout, counted from `first`."""
        bounds = zip(self.starts, self.stops, strict=True)
        return [np.arange(first + start, first + stop) for start, stop in bounds]


def from_padded(
    given: Mapping[str, Any], input_ids: Any, attention_mask: Any, loss_mask: Any
) -> Made:
    """See RolloutBatch.from_padded."""
    entries = _attended("input_ids", input_ids, "attention_mask", attention_mask)
    masks = entries.of("loss_mask", loss_mask, may_exceed=False)
    layout = PaddedLayout.of_columns(len(entries.rows[0]), entries.columns())
    return _made(given, entries.ids, masks, entries, layout)


def from_completions(
    given: Mapping[str, Any],
    prompt_ids: Any,
    prompt_mask: Any,
    completion_ids: Any,
    completion_mask: Any,
    loss_mask: Any,
    tool_mask: Any,
) -> Made:
    """See RolloutBatch.from_completions."""
    prompts = _attended("prompt_ids", prompt_ids, "prompt_mask", prompt_mask)
    responses = _attended("completion_ids", completion_ids, "completion_mask", completion_mask)
    if len(prompts.rows) != len(responses.rows):
        raise RolloutError(
            f"{_WHO}: prompt_ids has {len(prompts.rows)} rows, but completion_ids has "
            f"{len(responses.rows)}. Both have one row per rollout: repeat a prompt for each of "
            "its completions."
        )
    if loss_mask is not None and tool_mask is not None:
        raise RolloutError(
            f"{_WHO}: both loss_mask and tool_mask are given. Give loss_mask alone, or TRL's "
            "tool_mask, which is read where completion_mask is 1."
        )
    if loss_mask is not None:
        masks = responses.of("loss_mask", loss_mask, may_exceed=False)
    elif tool_mask is not None:
        masks = responses.of("tool_mask", tool_mask)
    else:
        masks = [np.ones(len(ids), bool) for ids in responses.ids]
    ids = [np.concatenate(pair) for pair in zip(prompts.ids, responses.ids, strict=True)]
    width = len(prompts.rows[0])
    columns = zip(prompts.columns(), responses.columns(width), strict=True)
    layout = PaddedLayout.of_columns(
        width + len(responses.rows[0]), [np.concatenate(pair) for pair in columns]
    )
    return _made(given, ids, masks, responses, layout, prompts.ids)


def from_jagged(
    given: Mapping[str, Any], input_ids: Any, loss_mask: Any, response_lengths: Any
) -> Made:
    """See RolloutBatch.from_jagged."""
    ids = _ids("input_ids", input_ids)
    layout = PaddedLayout.of_lengths(map(len, ids))
    lengths, like = [len(row) for row in ids], "input_ids"
    if response_lengths is not None:
        lengths, like = _per_rollout("response_lengths", response_lengths, len(ids)), "responses"
        for n, (length, row) in enumerate(zip(lengths, ids, strict=True)):
            if not isinstance(length, int) or not 0 <= length <= len(row):
                raise RolloutError(
                    f"{_WHO}: response_lengths[{n}] is {short(length)}, and this rollout has "
                    f"{len(row)} tokens. Give the length of its response, including tool tokens."
                )
    bounds = [len(row) - length for row, length in zip(ids, lengths, strict=True)]
    responses = [row[bound:] for row, bound in zip(ids, bounds, strict=True)]
    entries = _Entries(like, responses, [0] * len(ids), lengths)
    masks = entries.of("loss_mask", loss_mask)
    prompts = [row[:bound] for row, bound in zip(ids, bounds, strict=True)]
    return _made(given, ids, masks, entries, layout, None if response_lengths is None else prompts)


def _made(
    given: Mapping[str, Any],
    ids: list[np.ndarray],
    masks: list[Row],
    entries: _Entries,
    layout: PaddedLayout,
    prompts: list[np.ndarray] | None = None,
) -> Made:
    """Make rollouts with these ids, loss masks and fields.

    prompts: prompts of the rollouts, if `masks` and `entries` cover only responses.
    """
    if unknown := given.keys() - BatchFields.__annotations__.keys():
        takes = ", ".join(BatchFields.__annotations__)
        raise TypeError(f"A batch has no field {min(unknown)}; it takes {takes}.")
    count = len(ids)
    given = {name: value for name, value in given.items() if value is not None}
    names = _per_rollout("rollout_ids", given.get("rollout_ids", [None] * count), count)
    names = [read_identifier(_WHO, f"rollout_ids[{n}]", name) for n, name in enumerate(names)]
    check_unique(names, "a batch")

    fields: dict[str, Sequence[Any]] = {"advantage": [0.0] * count}
    over_tokens = {"loss_mask": masks}
    for field, own in _PER_ROLLOUT.items():
        if field in given:
            fields[own] = _per_rollout(field, given[field], count, one=field == "temperatures")
    for field, own in _EITHER.items():
        if field in given:
            values = _on_host(field, given[field])
            if _has_rows(values) and any(len(row) != 1 for row in entries.rows):
                rows = _rows(field, values)
                if len(rows) == count and all(len(row) == 1 for row in rows):
                    values = [row[0] for row in rows]  # [N, 1]
            if _has_rows(values):
                over_tokens[own] = entries.of(field, values)
            else:
                fields[own] = _per_rollout(field, values, count, one=True)
    for field in _PER_TOKEN:
        if field in given:
            over_tokens[field] = entries.of(field, given[field])
    if prompts is not None:
        for own, rows in over_tokens.items():
            pairs = zip(prompts, rows, strict=True)
            over_tokens[own] = [_after_zeros(len(prompt), row) for prompt, row in pairs]
        group_ids = fields.get("group_id", [None] * count)
        fields["group_id"] = [
            group_of(prompt) if group_id is None else group_id
            for prompt, group_id in zip(prompts, group_ids, strict=True)
        ]
    fields |= over_tokens | {"token_ids": ids, "rollout_id": fill_ids(names)}
    rollouts = []
    for n in range(count):
        try:
            rollouts.append(Rollout(**{own: values[n] for own, values in fields.items()}))
        except RolloutError as error:
            first = 0 if prompts is None else len(prompts[n])
            raise RolloutError(
                f"{error} Token {first} of {named(fields['rollout_id'][n])} is entry "
                f"[{n}, {entries.starts[n]}] of the batch's per-token fields."
            ) from None
    completion_layout = None
    if prompts is not None:
        pairs = zip(prompts, entries.columns(), strict=True)
        columns = [np.concatenate([np.full(len(p), NO_CELL), c]) for p, c in pairs]
        completion_layout = PaddedLayout.of_columns(max(map(len, entries.rows)), columns)
    return Made(rollouts, layout, completion_layout, "advantages" in given)


def _after_zeros(count: int, row: Row) -> Row:
    if isinstance(row, list | tuple):
        return [0] * count + list(row)
    return np.concatenate([np.zeros(count, row.dtype), row])


# Conversion of arguments -----------------------------------------------------------------------


def _on_host(field: str, values: Any) -> Any:
    """Convert tensors to arrays, and nested tensors and arrays of objects to lists. Other values
    stay unchanged."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor) and values.is_nested:
        parts = values.detach().unbind()
        flat = host_values(_WHO, field, torch.cat(parts))  # one copy to the host
        return np.split(flat, np.cumsum([len(part) for part in parts])[:-1])
    values = host_values(_WHO, field, values)
    if isinstance(values, np.ndarray) and values.dtype.kind == "O":
        return values.tolist()
    return values


def _has_rows(values: Any) -> bool:
    if isinstance(values, list | tuple):
        return len(values) > 0 and not isinstance(values[0], str) and np.ndim(values[0]) > 0
    return np.ndim(values) > 1


def _rows(field: str, values: Any) -> list[Row]:
    """Rows of an array or a tensor [N, W], of a nested tensor, or of a list."""
    values = _on_host(field, values)
    takes = "it takes one row per rollout: a tensor or an array [N, W], or a list of rows"
    if not isinstance(values, list | tuple):
        if np.ndim(values) != 2:
            shape = f" of shape {values.shape}" if isinstance(values, np.ndarray) else ""
            raise RolloutError(f"{_WHO}: {field} is {short(values)}{shape}; {takes}.")
        return list(values)
    rows = [host_values(_WHO, f"{field}[{n}]", row) for n, row in enumerate(values)]
    for n, row in enumerate(rows):
        if not isinstance(row, list | tuple) and np.ndim(row) != 1:
            raise RolloutError(f"{_WHO}: {field}[{n}] is {short(row)}; {takes}.")
    return rows


def _ids(field: str, values: Any) -> list[np.ndarray]:
    rows = [
        read_vector(_WHO, f"{field}[{n}]", row, "iu", f"{IDS}, one row per rollout.")
        for n, row in enumerate(_rows(field, values))
    ]
    if not rows:
        raise RolloutError("There are no rollouts; a batch takes at least one.")
    return rows


def _attended(like: str, ids: Any, field: str, mask: Any) -> _Entries:
    """Entries of ids [N, W] where the attention mask is 1. They must be consecutive in each row."""
    rows = _ids(like, ids)
    if uneven := [n for n, row in enumerate(rows) if len(row) != len(rows[0])]:
        raise RolloutError(
            f"{_WHO}: {like} has {len(rows[0])} entries in row 0 and {len(rows[uneven[0]])} in row "
            f"{uneven[0]}; it takes rows of one length, padded. RolloutBatch.from_jagged takes "
            "rows of different lengths."
        )
    every = _Entries(like, rows, [0] * len(rows), [len(row) for row in rows])
    takes = "it takes 0 and 1, or booleans: 1 where there is a token, 0 where there is padding."
    starts, stops = [], []
    for n, row in enumerate(every.of(field, mask)):
        array = read_mask(_WHO, f"{field}[{n}]", row, takes)
        tokens = np.flatnonzero(array)
        start, stop = (int(tokens[0]), int(tokens[-1]) + 1) if len(tokens) else (0, 0)
        if stop - start != len(tokens):
            hole = start + int(array[start:stop].argmin())
            raise RolloutError(
                f"{_WHO}: {field}[{n}, {hole}] is 0 between tokens. Put padding before or after "
                "the tokens of a row. Set loss_mask to 0 for tokens that are not trained."
            )
        starts.append(start)
        stops.append(stop)
    return _Entries(like, rows, starts, stops)


def _per_rollout(field: str, values: Any, count: int, *, one: bool = False) -> list[Any]:
    """One value per rollout. With `one`, a single value holds for all."""
    values = _on_host(field, values)
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if one and not isinstance(values, list | tuple | str):
        return [values] * count
    if not isinstance(values, list | tuple) or len(values) != count:
        raise RolloutError(
            f"{_WHO}: {field} is {short(values)}; it takes one value per rollout, {count} in all, "
            "in a list, an array or a tensor [N]."
        )
    return list(values)
