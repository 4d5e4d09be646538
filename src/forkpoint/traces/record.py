"""One sample of a trainer's dump, with errors that name file, record and field.

Imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts import Rollout, short

Array = NDArray[Any]


class RecordError(RolloutError):
    """A record that cannot be read; another record of the same file may be."""

    def __init__(self, where: str, field: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.field = field
        """What was wrong: a field of the record, or "record" for all of it."""

    @classmethod
    def of(cls, error: RolloutError, field: str) -> "RecordError":
        """The same message, as that of a record."""
        made = cls("", field, "")
        made.args = error.args
        return made


@dataclass(frozen=True)
class WrongRows:
    """Stands for a column that has not as many rows as the batch has samples."""

    message: str


class Record:
    """The values of one sample by the names that its trainer gives them.

    where: names file and record in messages.
    values: arrays and lists of one dimension, numbers, text.
    tokenizer: makes ids of text, for formats that hold text.
    rewarded: set where its rollout's advantage is a reward for now.
    """

    def __init__(
        self,
        where: str,
        values: Mapping[str, Any],
        tokenizer: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.where: str = where
        self.values: Mapping[str, Any] = values
        self.tokenizer: Callable[[str], list[int]] | None = tokenizer
        self.rewarded = False

    def has(self, name: str) -> bool:
        """Whether there is a value that is not None.

        Raises RecordError where it has not as many rows as there are samples.
        """
        value = self.values.get(name)
        if isinstance(value, WrongRows):
            raise self.fail(name, value.message)
        return value is not None

    def fail(self, field: str, message: str) -> RecordError:
        return RecordError(self.where, field, message)

    def ids(self, name: str) -> NDArray[np.int64]:
        """Token ids [n]; whether they are in range is for Rollout to say."""
        return self._vector(name, "iu", "whole numbers").astype(np.int64)

    def mask(self, name: str, length: int, of: str) -> NDArray[np.bool_]:
        """0 and 1 or booleans [length], as many as there are of `of`."""
        array = self._vector(name, "biuf", "0 and 1")
        self._check_length(name, array, length, of)
        refused = (array != 0) & (array != 1)
        if refused.any():
            at = int(refused.argmax())
            raise self.fail(name, f"{name}[{at}] is {short(array[at])}; it takes 0 and 1.")
        return array.astype(np.bool_)

    def floats(self, name: str, length: int, of: str) -> NDArray[np.float64] | None:
        """Numbers [length], as many as there are of `of`, or None where there are none."""
        if not self.has(name):
            return None
        array = self._vector(name, "iuf", "numbers")
        self._check_length(name, array, length, of)
        with np.errstate(invalid="ignore"):  # of signalling NaN, which Rollout refuses
            return array.astype(np.float64)

    def number(self, name: str) -> float | None:
        """A finite number, or None where there is none; an array of one is its number."""
        if not self.has(name):
            return None
        value: Any = self.values[name]
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in "biuf" or not np.isfinite(array).all():
            raise self.fail(name, f"{name} is {short(value)}; it takes one finite number.")
        return float(array.reshape(()))

    def per_token(self, name: str) -> bool:
        """Whether there is more than one number."""
        return self.has(name) and np.ndim(self.values[name]) > 0

    def first(self, *names: str) -> str:
        """The first of the names that there is a value for; the first of all if there is none."""
        return next((name for name in names if self.has(name)), names[0])

    def text(self, name: str) -> str | None:
        """Text or a whole number as text, or None where there is none."""
        value: Any = self.values[name] if self.has(name) else None
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.reshape(()).item()
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        raise self.fail(name, f"{name} is {short(value)}; it takes text or a whole number.")

    def refuse_media(self, *names: str) -> None:
        """Raises RecordError where there are images and the like: rollouts here are tokens only."""
        for name in names:
            if not _is_nothing(self.values.get(name)):
                raise self.fail(
                    name,
                    f"{name} holds media besides the tokens, and two rollouts with the same tokens "
                    "and other media share nothing. Rollouts of text alone can be read.",
                )

    def _vector(self, name: str, kinds: str, what: str) -> Array:
        if not self.has(name):
            raise self.fail(
                name, f"there is no {name}; the record has {short(sorted(self.values, key=str))}."
            )
        value = self.values[name]
        if isinstance(value, list) and any(isinstance(v, bool) for v in value) and "b" not in kinds:
            at = next(i for i, v in enumerate(value) if isinstance(v, bool))
            raise self.fail(name, f"{name}[{at}] is {value[at]}; it takes {what}.")
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, OverflowError):  # lists of lists of different lengths
            array = np.empty((), object)
        if array.ndim == 1 and not array.size:
            return array.astype(np.int64)
        if array.ndim != 1:
            shape = " x ".join(map(str, array.shape)) or f"{short(value)}"
            raise self.fail(name, f"{name} is {shape}; it takes one row of {what}.")
        if array.dtype.kind not in kinds:
            at = next((i for i, v in enumerate(array) if np.asarray(v).dtype.kind not in kinds), 0)
            raise self.fail(
                name,
                f"{name}[{at}] is {short(array[at])} ({array.dtype}); it takes {what}.",
            )
        return array

    def _check_length(self, name: str, array: Array, length: int, of: str) -> None:
        if len(array) != length:
            raise self.fail(name, f"{name} has {len(array)} entries, but {of} has {length}.")


def _is_nothing(value: Any) -> bool:
    """None, what is empty, or holds None alone, as trainers write where there is only text."""
    if isinstance(value, np.ndarray):
        value = value.tolist() if value.dtype == object else [0] * value.size
    if isinstance(value, Mapping):
        value = list(value.values())
    return value is None or (isinstance(value, list | tuple) and all(v is None for v in value))


def unpadded(record: Record, name: str, mask: NDArray[np.bool_], side: str) -> slice:
    """Where the tokens lie in a row that is padded, on the left or the right ("either" for both).

    Raises RecordError where padding lies between tokens, or on the other side.
    """
    inside = np.flatnonzero(mask)
    if not len(inside):
        return slice(0, 0)
    begin, end = int(inside[0]), int(inside[-1]) + 1
    if end - begin != len(inside):
        at = begin + int((~mask[begin:end]).argmax())
        raise record.fail(name, f"{name}[{at}] is 0 between tokens; padding lies at the ends only.")
    if side == "left" and end != len(mask):
        raise record.fail(name, f"{name}[{end}] is 0 after tokens; prompts are padded on the left.")
    if side == "right" and begin != 0:
        raise record.fail(name, f"{name}[0] is 0 before tokens; responses are padded on the right.")
    return slice(begin, end)


def spread(values: Array | None, begin: int, length: int) -> Array | None:
    """`values` from position `begin` of an array of `length`, with 0 elsewhere."""
    if values is None:
        return None
    out = np.zeros(length, values.dtype)
    out[begin : begin + len(values)] = values
    return out


def group_of(prompt: Array | str) -> str:
    """A group_id that is equal for equal prompts."""
    content = prompt.encode() if isinstance(prompt, str) else prompt.astype("<i8").tobytes()
    return f"prompt-{blake2b(content, digest_size=8).hexdigest()}"


def make(record: Record, names: Mapping[str, str], **values: Any) -> Rollout:
    """The rollout of a record.

    Args:
        record: what it is made of.
        names: for fields of Rollout, the field of the record that each was read from, where it has
            another name.
        values: the fields of Rollout. Numbers per token that are the same on all trained tokens
            become one number: the others are never read.

    Raises RecordError where Rollout refuses a value.
    """
    mask = values["loss_mask"]
    for name in ("advantage", "weights", "returns"):
        value = values.get(name)
        if isinstance(value, np.ndarray) and value.shape == np.shape(mask):
            trained = value[mask]
            if np.isfinite(value).all() and (trained == trained[:1]).all():
                values[name] = float(trained[0]) if len(trained) else 0.0
    try:
        return Rollout(**values)
    except RolloutError as error:
        field = field_of(error)
        source = names.get(field, field)
        origin = "" if source == field else f" ({field} is the record's {source}.)"
        raise RecordError(record.where, source, f"{error}{origin}") from None


def field_of(error: RolloutError) -> str:
    """The field of Rollout that its refusal is about, "record" where it is about none."""
    return next((name for name in Rollout.__slots__ if f": {name}" in str(error)), "record")
