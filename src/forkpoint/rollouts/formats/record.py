"""One sample of a trainer's dump, with errors that name file, record and field.

Imports no torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import Rollout, short
from forkpoint.rollouts.batch import group_of as group_of
from forkpoint.rollouts.fields import is_number, read_vector

Array = NDArray[Any]
_MOST_SHOWN = 80
_MOST_KEYS = 1_000
_MOST_NESTED = 4


class RecordError(RolloutError):
    """A record that cannot be read; another record of the same file may be."""

    def __init__(self, where: str, field: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.field = field
        """Name of the fault's place: a field of the record, or "record" for all of it."""

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


class Row(Mapping[str, Any]):
    """Values of one sample, and those that it shares with others, without a copy of these."""

    def __init__(self, own: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
        self._own, self._shared = own, shared

    def __getitem__(self, name: str) -> Any:
        return self._own[name] if name in self._own else self._shared[name]

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._shared if name not in self._own)
        yield from self._own

    def __len__(self) -> int:
        return sum(1 for _ in self)


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
        array = self.row(name, "iu", "whole numbers of 64 bits")
        beyond = array > np.iinfo(np.int64).max
        if beyond.any():
            at = int(beyond.argmax())
            raise self.fail(name, f"{name}[{at}] is {array[at]}, which is more than int64 holds.")
        return array.astype(np.int64)

    def mask(self, name: str, length: int, of: str) -> NDArray[np.bool_]:
        """0 and 1 or booleans [length], as many as there are of `of`."""
        array = self.row(name, "biuf", "0 and 1")
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
        array = self.row(name, "iuf", "numbers")
        self._check_length(name, array, length, of)
        with np.errstate(invalid="ignore", over="ignore"):  # signalling NaN; wider floats
            return array.astype(np.float64)

    def number(self, name: str) -> float | None:
        """A finite number, or None where there is none; an array or list of one is its number."""
        if not self.has(name):
            return None
        value: Any = self.values[name]
        for _ in range(_MOST_NESTED):
            if isinstance(value, np.ndarray) and value.size == 1:
                value = value.reshape(()).item()
            elif isinstance(value, list | tuple) and len(value) == 1:
                value = value[0]
        if isinstance(value, bool | np.bool_) or (
            not isinstance(value, list | tuple) and is_number(value)
        ):
            number = float(value)
            if np.isfinite(number):
                return number
        raise self.fail(name, f"{name} is {short(self.values[name])}; it takes one finite number.")

    def per_token(self, name: str) -> bool:
        """Whether there is a row of numbers, not one."""
        if not self.has(name):
            return False
        value = self.values[name]
        return value.ndim > 0 if isinstance(value, np.ndarray) else isinstance(value, list | tuple)

    def length(self, name: str) -> int:
        """How many entries a row has, 0 where there is none.

        Raises RecordError where it is no row.
        """
        if not self.has(name):
            return 0
        value = self.values[name]
        if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1):
            return len(value)
        raise self.fail(name, f"{name} is {short(value)}; it takes one row.")

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
        if isinstance(value, int) and not isinstance(value, bool | np.ndarray):
            digits = short(value)  # Python writes no number of thousands of digits: none is a name
            if digits.lstrip("-").isdigit():
                return digits
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

    def row(self, name: str, kinds: str, what: str) -> Array:
        """One row [n] of numbers; the only place where values of a record become arrays.

        Args:
            name: the field.
            kinds: numpy's letters of the kinds that are allowed.
            what: the kinds in words.

        Raises RecordError where the field is missing, is no row, or has other values.
        """
        if not self.has(name):
            keys = sorted(named(key) for key in islice(self.values, _MOST_KEYS))
            raise self.fail(name, f"there is no {name}; the record has {short(keys)}.")
        takes = f"it takes one row of {what}."
        try:
            return read_vector(self.where, name, self.values[name], kinds, takes)
        except RolloutError as error:
            raise RecordError.of(error, name) from None

    def _check_length(self, name: str, array: Array, length: int, of: str) -> None:
        if len(array) != length:
            raise self.fail(name, f"{name} has {len(array)} entries, but {of} has {length}.")


def named(name: Any) -> str:
    """A key as messages show it."""
    return name if isinstance(name, str) and len(name) <= _MOST_SHOWN else short(name)


def _is_nothing(value: Any) -> bool:
    """None, what is empty, or holds None alone, as trainers write where there is only text."""
    if isinstance(value, np.ndarray):
        if value.dtype != object:
            return not value.size
        value = value.ravel().tolist()
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
