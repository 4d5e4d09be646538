"""The cells of padded tensors that hold the tokens of a batch, and values put into those cells."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.rollouts.fields import short

NO_CELL = -1
"""The column of tokens that a padded tensor has no cells for."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PaddedLayout:
    """The cells of a padded tensor [N, W] that hold the tokens of a batch.

    N is the number of rollouts, T that of all their tokens. The tokens of rollout n lie in row n,
    in K runs of neighbouring columns: one, or two for a prompt and a completion that were padded
    each on its own.

    width: the columns W.
    columns: int64 [N, K], read-only; the column where each run begins, or -1 for a run that has no
        cells, such as a prompt in a tensor of completions.
    lengths: int64 [N, K], read-only; the tokens of each run. They add up to T.
    """

    width: int
    columns: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __post_init__(self) -> None:
        self.columns.flags.writeable = False
        self.lengths.flags.writeable = False

    def __repr__(self) -> str:
        runs = self.columns.shape[1]
        return f"PaddedLayout({len(self.columns)} x {self.width}, {runs} runs a rollout)"

    @classmethod
    def of_lengths(cls, lengths: NDArray[np.int64]) -> "PaddedLayout":
        """The layout of rollouts of these lengths, [N], padded on the right to the longest."""
        return cls(
            int(lengths.max(initial=0)), np.zeros((len(lengths), 1), np.int64), lengths[:, None]
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, W)."""
        return len(self.columns), self.width

    def mask(self) -> NDArray[np.bool_]:
        """True for the cells that hold tokens: bool [N, W]."""
        return self.pad(np.ones(self.lengths.sum(), np.bool_), False)

    def select(self, rollouts: Sequence[int]) -> "PaddedLayout":
        """The layout of these rollouts, in this order; W stays."""
        return PaddedLayout(self.width, self.columns[rollouts], self.lengths[rollouts])

    def pad(self, values: Any, fill: float = 0) -> Any:
        """`values` [T, ...] in their cells: [N, W, ...], `fill` elsewhere.

        Takes and returns what RolloutBatch.to_padded does, and raises its errors.
        """
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(values, torch.Tensor):
            values = _array(values)
            self._check(values.shape)
            integers = np.iinfo(values.dtype) if values.dtype.kind in "iu" else None
            _check_fill(fill, values.dtype, integers, boolean=values.dtype.kind == "b")
            gaps, lengths = self._gaps(), self.lengths.ravel()
            runs = np.split(values, np.cumsum(lengths)[:-1])
            filler = np.full((max(gaps), *values.shape[1:]), fill, values.dtype)
            padded = np.concatenate(self._pieces(runs, filler, gaps))
        else:
            if values.is_nested or values.layout != torch.strided:
                raise RolloutError(
                    f"values is a tensor of the layout {values.layout}; it takes a flat one, [T]. "
                    "Give .values() of a jagged one, .to_dense() of a sparse one."
                )
            self._check(values.shape)
            boolean = values.dtype == torch.bool
            whole = not (boolean or values.is_floating_point() or values.is_complex())
            integers = torch.iinfo(values.dtype) if whole else None
            _check_fill(fill, values.dtype, integers, boolean=boolean)
            # Runs are split and joined in one call each: one node of the graph for all of them, no
            # index per token, and nothing that depends on the device.
            gaps, lengths = self._gaps(), self.lengths.ravel()
            filler = values.new_full((max(gaps), *values.shape[1:]), fill)
            runs = values.split(lengths.tolist())
            padded = torch.cat(self._pieces(runs, filler, gaps))
        return padded.reshape(*self.shape, *values.shape[1:])

    def _check(self, shape: Sequence[int]) -> None:
        total = int(self.lengths.sum())
        if not len(shape) or shape[0] != total:
            raise RolloutError(
                f"values has the shape {tuple(shape)}, and the batch has {total} tokens; it takes "
                "one value per token, of all rollouts one after another: [T] or [T, ...]."
            )

    def _gaps(self) -> list[int]:
        """The cells without tokens before each run that has cells, and those after the last."""
        there = self.columns != NO_CELL
        begins = (self.columns + np.arange(len(self.columns))[:, None] * self.width)[there]
        ends = begins + self.lengths[there]
        bounds = np.concatenate([[0], ends]), np.concatenate([begins, [self._cells]])
        return (bounds[1] - bounds[0]).tolist()

    def _pieces(self, runs: Sequence[Any], filler: Any, gaps: Sequence[int]) -> list[Any]:
        """The runs that have cells, with what fills the gaps before, between and after them."""
        pieces = []
        there = (self.columns != NO_CELL).ravel().tolist()
        of_cells = [run for run, has_cells in zip(runs, there, strict=True) if has_cells]
        for gap, run in zip(gaps, of_cells, strict=False):
            pieces += [filler[:gap], run] if gap else [run]
        return [*pieces, filler[: gaps[-1]]]

    @property
    def _cells(self) -> int:
        return len(self.columns) * self.width


def _array(values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # of lists of different lengths
        array = np.empty(0, np.object_)
    if array.dtype.kind not in "biufc":
        raise RolloutError(
            f"values is {short(values)}; it takes a flat tensor, array or list of numbers, [T]."
        )
    return array


def _check_fill(fill: Any, dtype: Any, integers: Any, *, boolean: bool) -> None:
    """Raises ConfigError unless `fill` is a value of `dtype`; `integers` is its iinfo or None."""
    if isinstance(fill, (int, float, np.integer, np.floating)):
        if boolean and fill in (0, 1):
            return
        if integers and float(fill).is_integer() and integers.min <= fill <= integers.max:
            return
        if not boolean and not integers:
            return
    raise ConfigError(
        f"fill is {short(fill)}; it takes a number that {dtype}, the dtype of the values, can hold."
    )
