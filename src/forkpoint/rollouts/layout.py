"""Layouts of padded tensors: the cells of a batch's tokens."""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.rollouts.fields import short

NO_CELL = -1
"""Column of tokens without a cell in a padded tensor."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PaddedLayout:
    """Cells of the T tokens of a batch in a padded tensor [N, W]. Rollout n is in row n.

    Attributes:
        width: number of columns, W.
        offsets: int64 [N + 1], read-only; rollout n has the tokens `offsets[n] : offsets[n + 1]`.
        columns: int64 [T], read-only; the column of each token, or -1 for a token without a cell,
            such as a prompt's in a tensor of completions.
    """

    width: int
    offsets: NDArray[np.int64]
    columns: NDArray[np.int64]

    def __post_init__(self) -> None:
        self.offsets.flags.writeable = False
        self.columns.flags.writeable = False

    def __repr__(self) -> str:
        return f"PaddedLayout({self.shape[0]} x {self.width})"

    @classmethod
    def of_columns(cls, width: int, columns: Sequence[NDArray[np.int64]]) -> "PaddedLayout":
        """Make a layout from the columns of the tokens, one array for each rollout."""
        offsets = np.cumsum([0, *map(len, columns)], dtype=np.int64)
        return cls(width, offsets, np.concatenate([np.zeros(0, np.int64), *columns]))

    @classmethod
    def of_lengths(cls, lengths: Iterable[int]) -> "PaddedLayout":
        """The layout of rollouts of these lengths, padded on the right to the longest."""
        found = np.fromiter(lengths, np.int64)
        offsets = np.concatenate([[0], np.cumsum(found)])
        columns = np.arange(offsets[-1])
        columns -= np.repeat(offsets[:-1], found)
        return cls(int(found.max(initial=0)), offsets, columns)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, W)."""
        return len(self.offsets) - 1, self.width

    def mask(self) -> NDArray[np.bool_]:
        """Mask of the cells with tokens: bool [N, W]."""
        return self.pad(np.ones(len(self.columns), np.bool_), False)

    def select(self, rollouts: Sequence[int]) -> "PaddedLayout":
        """The layout of these rollouts, in this order, with equal W."""
        rows = np.split(self.columns, self.offsets[1:-1])
        return PaddedLayout.of_columns(self.width, [rows[n] for n in rollouts])

    def pad(self, values: Any, fill: float = 0) -> Any:
        """Copy `values` [T, ...] to their cells, and `fill` to the others: [N, W, ...].

        Arguments, result and errors are those of RolloutBatch.to_padded.
        """
        torch = sys.modules.get("torch")
        tokens = np.flatnonzero(self.columns != NO_CELL)
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.offsets))
        cells = (rows * self.width + self.columns)[tokens]
        if torch is None or not isinstance(values, torch.Tensor):
            array = _array(values)
            kind = array.dtype.kind
            limits = None if kind == "b" else (np.iinfo if kind in "iu" else np.finfo)(array.dtype)
            self._check(array, fill, limits, whole=kind in "biu")
            padded: Any = np.full((self.shape[0] * self.width, *array.shape[1:]), fill, array.dtype)
            padded[cells] = array[tokens]
            return padded.reshape(*self.shape, *array.shape[1:])
        if values.is_nested or values.layout != torch.strided:
            raise RolloutError(
                f"values is a tensor of the layout {values.layout}; it takes a flat one, [T]. Give "
                ".values() of a jagged one, .to_dense() of a sparse one."
            )
        whole = not (values.is_floating_point() or values.is_complex())
        limits = None
        if values.dtype != torch.bool:
            limits = (torch.iinfo if whole else torch.finfo)(values.dtype)
        self._check(values, fill, limits, whole=whole)
        padded = values.new_full((self.shape[0] * self.width, *values.shape[1:]), fill)
        chosen, places = (torch.from_numpy(x).to(values.device) for x in (tokens, cells))
        padded = padded.index_copy(0, places, values[chosen])
        return padded.reshape(*self.shape, *values.shape[1:])

    def _check(self, values: Any, fill: Any, limits: Any, *, whole: bool) -> None:
        """Raises RolloutError for values of another length, and ConfigError for a `fill` that their
        dtype cannot represent.

        `limits`: smallest and largest finite number of the dtype; None for booleans.
        """
        if not values.ndim or len(values) != len(self.columns):
            raise RolloutError(
                f"values has the shape {tuple(values.shape)}, and the batch has "
                f"{len(self.columns)} tokens; it takes one value per token: [T] or [T, ...]."
            )
        least, most = (limits.min, limits.max) if limits else (0, 1)
        number = fill.item() if isinstance(fill, np.number) else fill
        held = isinstance(number, int | float)
        if held and whole:
            held = least <= number <= most and number == int(number)
        elif held:  # floats hold NaN and infinities
            held = number != number or abs(number) == math.inf or abs(number) <= float(most)
        if not held:
            raise ConfigError(
                f"fill is {short(fill)}; it takes a number that {values.dtype}, the dtype of the "
                "values, can hold."
            )


def _array(values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # for lists of different lengths
        array = np.empty(0, np.object_)
    if array.dtype.kind not in "biufc":
        raise RolloutError(
            f"values is {short(values)}; it takes a flat tensor, array or list of numbers, [T]."
        )
    return array
