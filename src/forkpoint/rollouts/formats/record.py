"""Samples of a trainer's dump: values by name, and the rollouts made from them.

Imports no torch. Values are numbers, text, lists and numpy arrays.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import Rollout, group_of, short
from forkpoint.rollouts.fields import is_number, read_mask, read_vector
from forkpoint.rollouts.formats.text import Tokenizer
from forkpoint.rollouts.media_entries import MediaEntries

Made = tuple[Rollout, bool]
"""A rollout, and whether its advantage is still a reward."""
SHARED = "meta_info"
"""Key of a table for settings that its samples share."""
_MEDIA = (
    *("multi_modal_inputs", "multi_modal_data", "pixel_values", "image_grid_thw", "mm_kwargs"),
    *("multimodal_inputs", "multimodal_train_inputs", "images", "mm_train_inputs"),
)


class RecordError(RolloutError):
    """Error for a record that cannot be read. Other records of the file may be valid.

    field: the wrong field, or "record" for the whole record.
    """

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Record:
    """Values of one sample by the trainer's names.

    where: file and record, for messages.
    values: one-dimensional arrays and lists, numbers, and text; or a RecordError for a value that
    cannot be assigned to the sample.
    tokenize: computes ids of text and messages, for formats with text.
    media: reader of images and videos, for formats with media.
    path: path of the file, with which `where` begins.
    """

    where: str
    values: Mapping[str, Any]
    tokenize: Tokenizer | None = None
    media: MediaEntries | None = None
    path: Path | None = None

    @property
    def place(self) -> str:
        """Position of the record in its file, such as "line 3, row 0"."""
        return self.where.removeprefix(f"{self.path}, ")

    def fail(self, field: str, message: str) -> RecordError:
        return RecordError(f"{self.where}: {message}", field)

    def get(self, name: str) -> Any:
        """The value, or None. Raises RecordError if it cannot be assigned to the sample."""
        value = self.values.get(name)
        if isinstance(value, RecordError):
            raise value
        return value

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def first(self, *names: str) -> str:
        """The first name with a value; the first name if none has a value."""
        return next((name for name in names if self.has(name)), names[0])

    def row(self, name: str, kinds: str, what: str) -> NDArray[Any]:
        """Read one row of numbers: [n].

        Args:
            kinds: numpy's letters of the allowed kinds.
            what: the kinds in words, for messages.

        Raises RecordError if the field is missing, is not one row, or has other values.
        """
        return self._read(name, read_vector, kinds, f"it takes one row of {what}.")

    def _read(self, name: str, read: Callable[..., NDArray[Any]], *takes: str) -> NDArray[Any]:
        if not self.has(name):
            keys = sorted(key for key in self.values if isinstance(key, str))
            raise self.fail(name, f"there is no {name}; the record has {short(keys)}. Add it.")
        try:
            return read(self.where, name, self.values[name], *takes)
        except RolloutError as error:
            raise RecordError(str(error), name) from None

    def ids(self, name: str) -> NDArray[np.int64]:
        """Read token ids: int64 [n]. `Rollout` checks their range."""
        array = self.row(name, "iu", "whole numbers of 64 bits")
        if (beyond := array > np.iinfo(np.int64).max).any():
            at = int(beyond.argmax())
            raise self.fail(name, f"{name}[{at}] is {array[at]}, which is more than int64 holds.")
        return array.astype(np.int64)

    def mask(self, name: str, length: int, of: str) -> NDArray[np.bool_]:
        """Read a mask of 0 and 1 or booleans, as long as `of`: bool [length]."""
        array = self._read(name, read_mask, "it takes one row of 0 and 1.")
        return self._as_long(name, array, length, of)

    def floats(self, name: str, length: int, of: str) -> NDArray[np.float64]:
        """Read numbers, as many as the entries of `of`: float64 [length]."""
        array = self._as_long(name, self.row(name, "iuf", "numbers"), length, of)
        with np.errstate(invalid="ignore", over="ignore"):  # signalling NaN; wider floats
            return array.astype(np.float64)

    def _as_long(self, name: str, array: NDArray[Any], length: int, of: str) -> NDArray[Any]:
        if len(array) != length:
            raise self.fail(
                name, f"{name} has {len(array)} entries, but {of} has {length}. Write as many."
            )
        return array

    def number(self, name: str) -> float | None:
        """Read a finite number, also from a list or array of one entry; or None."""
        value: Any = self.get(name)
        while isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.reshape(()).item()
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            is_flag = isinstance(value, bool | np.bool_)
            if (is_flag or is_number(value)) and np.isfinite(float(value)):
                return float(value)
        raise self.fail(name, f"{name} is {short(self.values[name])}; it takes one finite number.")

    def count(self, name: str, most: int, of: str) -> int:
        """Read a whole number from 0 to the number of entries of `of`."""
        found = self.number(name)
        if found is None or found != int(found) or not 0 <= found <= most:
            raise self.fail(
                name,
                f"{name} is {short(self.get(name))}; it takes a whole number up to the {most} "
                f"entries of {of}.",
            )
        return int(found)

    def text(self, name: str) -> str | None:
        """Read text, a whole number as text, or None."""
        value = self.get(name)
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.reshape(()).item()
        if isinstance(value, np.integer):
            value = int(value)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 64:
            return str(value)
        raise self.fail(name, f"{name} is {short(value)}; it takes text or a whole number.")

    def encode(self, name: str, text: str) -> list[int]:
        """Compute the token ids of text of a field. The record has a tokenizer."""
        assert self.tokenize is not None
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self.fail(
                name,
                f"{name} has half of a surrogate pair, which tokenizers refuse. Correct the text, "
                "or leave the record out (on_error='skip').",
            ) from None
        return [index(token) for token in self.tokenize.encode(text)]


@dataclass(frozen=True)
class Format:
    """A format: its name, its keys, and the function that makes rollouts from a record.

    signatures: sets of keys. A record has this format if it has all keys of one set ...
    without: ... and none of these keys.
    key: fields. The nesting of the first one in a table distinguishes a batch from one sample.
    rollouts: makes the rollouts of one record, usually one.
    text: whether values of `key` are text, so that a list of texts is a batch.
    notes: remarks for users of the rollouts.
    """

    name: str
    signatures: tuple[frozenset[str], ...]
    without: frozenset[str]
    key: tuple[str, ...]
    rollouts: Callable[[Record], Iterator[Made]]
    text: bool = False
    notes: tuple[str, ...] = ()

    def matches(self, keys: frozenset[str]) -> bool:
        return any(s <= keys for s in self.signatures) and not self.without & keys


def samples(
    where: str,
    table: Mapping[str, Any],
    format: Format,
    tokenize: Tokenizer | None,
    media: MediaEntries | None = None,
    path: Path | None = None,
) -> Iterator[Record]:
    """Yield the samples of a table, or the table itself if it is one sample."""
    settings = table.get(SHARED)
    shared: dict[str, Any] = dict(settings) if isinstance(settings, Mapping) else {}
    key = next((name for name in format.key if table.get(name) is not None), None)
    if key is None or not _is_batch(table[key], text=format.text):
        yield Record(where, {**shared, **table}, tokenize, media, path)
        return
    count = len(table[key])
    columns: dict[str, Any] = {}
    for name, value in table.items():
        if not isinstance(value, list) and not (isinstance(value, np.ndarray) and value.ndim):
            shared[name] = value
        elif len(value) == count:
            columns[name] = value
        elif isinstance(value, list) and not value:
            shared[name] = None  # a field that was never filled
        else:  # raises an error only if the format reads this field
            shared[name] = RecordError(
                f"{where}: {short(name)} has {len(value)} rows, but {key} has {count}. Write one "
                "row per rollout.",
                str(name),
            )
    for n in range(count):
        row = {name: column[n] for name, column in columns.items()}
        yield Record(f"{where}, row {n}", ChainMap(row, shared), tokenize, media, path)


def _is_batch(value: Any, *, text: bool) -> bool:
    """Whether it has values of several samples: rows of tokens, or a list of texts."""
    if isinstance(value, np.ndarray) and value.ndim != 1:
        return value.ndim > 1
    if not isinstance(value, list | np.ndarray) or not len(value):
        return False
    return isinstance(value[0], str if text else list | tuple | np.ndarray)


def make(
    record: Record,
    columns: Mapping[str, str | tuple[str, ...]],
    *,
    ids: NDArray[np.int64],
    trained: NDArray[np.bool_],
    names: tuple[str, str],
    entries: tuple[str, int] | None = None,
    prompt: int | None = None,
    padding: tuple[tuple[str, NDArray[np.bool_]], ...] = (),
    **given: Any,
) -> Made:
    """Make the rollout of a record. Padding is removed, and entries are moved to their tokens.

    Args:
        columns: for other fields of Rollout, and for "reward", the column, or several columns in
            order of preference.
        ids: all tokens, with padding: [W].
        trained: the loss mask of the last tokens: [up to W].
        names: columns of ids and of the loss mask, for messages.
        entries: the column whose length columns per token have, and this length. They belong to the
            last tokens of `ids`. None means all of `ids`.
        prompt: number of tokens of the prompt, with padding. None means the tokens before the first
            trained one.
        padding: columns and masks, together [W], that are 0 at padding.
        given: further fields of Rollout; None takes them from the record.

    Raises RecordError for values that a rollout cannot have, for media, and for padding that is
    between tokens or trained.
    """
    for name in _MEDIA:
        if not _is_nothing(record.get(name)):
            raise record.fail(
                name,
                f"{name} has media, which this format is not read with: rollouts with equal tokens "
                "and different media must not share. Give rollouts of text.",
            )
    real = np.concatenate([m for _, m in padding]) if padding else np.ones(len(ids), np.bool_)
    _check_padding(record, padding, real, trained, names[1])
    sources = {"token_ids": names[0], "loss_mask": names[1]}
    mask = _at_the_end(trained, len(ids))[real]
    values: dict[str, Any] = {"token_ids": ids[real], "loss_mask": mask}
    of, length = entries or (names[0], len(ids))
    for field, candidates in columns.items():
        name = record.first(*((candidates,) if isinstance(candidates, str) else candidates))
        sources[field] = name
        if field == "group_id":
            values[field] = record.text(name)
        elif field in ("advantage", "weights", "reward") and not _is_row(record.get(name), length):
            values[field] = record.number(name)
        elif record.has(name):
            values[field] = _at_the_end(record.floats(name, length, of), len(ids))[real]
    values |= {name: value for name, value in given.items() if value is not None}
    if "old_values" not in values:  # trainers without a critic also write the advantages as returns
        values.pop("returns", None)
    for field in ("advantage", "weights", "returns"):
        values[field] = _one_number(values.get(field), mask)
    reward = values.pop("reward", None)
    if rewarded := values["advantage"] is None:
        values["advantage"] = _total_reward(record, reward, sources)
        values["extras"] = {"reward": values["advantage"]}
    if "temperature" not in values and record.has("temperature"):
        values["temperature"] = record.number("temperature")
    if values.get("group_id") is None:
        end = int(mask.argmax()) if mask.any() else len(mask)
        end = end if prompt is None else int(real[:prompt].sum())
        values["group_id"] = group_of(values["token_ids"][:end])
    try:
        return Rollout(**values), rewarded
    except RolloutError as error:
        field = field_of(error)
        source = sources.get(field, field)
        origin = "" if source == field else f" ({field} is the record's {source}.)"
        raise RecordError(f"{record.where}: {error}{origin}", source) from None


def _total_reward(record: Record, reward: Any, sources: Mapping[str, str]) -> float:
    """Sum of the rewards of a record without advantage. `sources`: columns of fields."""
    wanted = sources.get("advantage", sources.get("reward", "advantage"))
    if reward is None:
        known = " and no ".join(sources[f] for f in ("advantage", "reward") if f in sources)
        raise record.fail(wanted, f"there is no {known}. Add it.")
    if not np.isfinite(reward).all():
        at = int(np.isfinite(reward).argmin())
        raise record.fail(
            sources["reward"],
            f"{sources['reward']} is {reward[at]} at token {at}; it takes finite numbers.",
        )
    return float(np.sum(reward))


def _check_padding(
    record: Record,
    padding: tuple[tuple[str, NDArray[np.bool_]], ...],
    real: NDArray[np.bool_],
    trained: NDArray[np.bool_],
    mask_name: str,
) -> None:
    tokens = np.flatnonzero(real)
    if len(tokens) and tokens[-1] - tokens[0] + 1 != len(tokens):
        at = int(tokens[0] + (~real[tokens[0] :]).argmax())
        for name, part in padding:
            if at < len(part):
                raise record.fail(
                    name, f"{name}[{at}] is 0 between tokens. Put padding at the ends only."
                )
            at -= len(part)
    if (outside := trained & ~real[len(real) - len(trained) :]).any():
        at = int(outside.argmax())
        raise record.fail(mask_name, f"{mask_name}[{at}] is 1 at padding. Set it to 0.")


def _at_the_end(values: NDArray[Any], length: int) -> NDArray[Any]:
    """The values with zeros before them: [length]."""
    return np.concatenate([np.zeros(length - len(values), values.dtype), values])


def _is_row(value: Any, length: int) -> bool:
    """Whether a value has numbers per token, not one number or a list of one."""
    if isinstance(value, np.ndarray) and not value.ndim:
        return False
    is_listed = isinstance(value, list | tuple | np.ndarray)
    return is_listed and (len(value) != 1 or length == 1)


def _one_number(values: Any, mask: NDArray[np.bool_]) -> Any:
    """One number instead of numbers per token, if all trained tokens have the same number."""
    if not isinstance(values, np.ndarray) or not np.isfinite(values).all():
        return values
    used = values[mask]
    if (used != used[:1]).any():
        return values
    return float(used[0]) if len(used) else 0.0


def _is_nothing(value: Any) -> bool:
    """Whether a value is None, empty, or contains only None, as trainers write for samples without
    media."""
    if isinstance(value, np.ndarray):
        if value.dtype != object:
            return not value.size
        value = value.ravel().tolist()
    if isinstance(value, Mapping):
        value = list(value.values())
    return value is None or (isinstance(value, list | tuple) and all(v is None for v in value))


def field_of(error: RolloutError) -> str:
    """The field that an error of Rollout names; "record" if it names none."""
    return next((name for name in Rollout.__slots__ if f": {name}" in str(error)), "record")
