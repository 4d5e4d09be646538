"""The entries of per-token fields that belong to the tokens of a batch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch_tensors.rows import (
    WHO,
    Rows,
    dimensions,
    read_matrix,
    read_rows,
    shape_text,
    split_rows,
)
from forkpoint.rollouts.fields import Place, named, read_vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """The entries of per-token fields that belong to tokens, and the tokens without entries.

    Rollout n consists of `leading[n]` tokens that the fields have no entries for, such as a prompt
    where fields are over completions, and of the entries `columns[n] : columns[n] + lengths[n]` of
    row n.

    names: the rollout_ids.
    columns, lengths, leading: int64 [N].
    width: the columns W of fields [N, W]; None of jagged fields, whose rows have `lengths` entries.
    like: the field whose shape the others must have.
    advice: what to do with fields of another shape.
    """

    names: tuple[str, ...]
    columns: NDArray[np.int64]
    lengths: NDArray[np.int64]
    leading: NDArray[np.int64]
    width: int | None
    like: str
    advice: str

    @property
    def offsets(self) -> NDArray[np.int64]:
        """The starts of the rollouts in the flat arrays, and T: int64 [N + 1]."""
        return np.concatenate([[0], np.cumsum(self.leading + self.lengths)])

    @property
    def takes(self) -> str:
        """The shapes of a per-token field, for error messages."""
        if self.width is not None:
            return f"[{len(self.names)}, {self.width}] as {self.like}, one row per rollout"
        return f"a nested tensor, a list of rows, or flat values, each as long as {self.like}"

    @property
    def _rule(self) -> str:
        return (
            "Every per-token field has one entry per token of these, and it belongs to that "
            f"token. {self.advice}"
        )

    def rows(self, field: str, values: Any, kinds: str, takes: str, *, missing: bool) -> Rows:
        """The rows of a per-token field, from what `on_host` returned.

        Raises RolloutError for other shapes than those that the tokens have.
        """
        if self.width is not None:
            matrix = read_matrix(field, values, kinds, takes, missing=missing)
            if matrix.shape != (len(self.names), self.width):
                raise RolloutError(
                    f"{WHO}: {field} has the shape {shape_text(matrix.shape)}, but {self.like} has "
                    f"{len(self.names)} x {self.width}. {self._rule}"
                )
            return matrix
        if dimensions(values) == 1:
            flat = read_vector(WHO, field, values, kinds, takes, missing=missing)
            total = int(self.lengths.sum())
            if len(flat) != total:
                raise RolloutError(
                    f"{WHO}: {field} has {len(flat)} entries, but {self.like} has {total}. "
                    f"{self._rule}"
                )
            return split_rows(flat, np.concatenate([[0], np.cumsum(self.lengths)]))
        rows = read_rows(field, values, kinds, takes, missing=missing)
        if len(rows) != len(self.names):
            raise RolloutError(
                f"{WHO}: {field} has {len(rows)} rows, but {self.like} has {len(self.names)}."
            )
        for name, row, length in zip(self.names, rows, self.lengths.tolist(), strict=True):
            if len(row) != length:
                raise RolloutError(
                    f"{named(name)}: {field} has {len(row)} entries, but {self.like} has {length}. "
                    f"{self._rule}"
                )
        return rows

    def gather(self, rows: Rows, dtype: DTypeLike | None = None) -> np.ndarray:
        """The entries as a flat array [T] of `dtype`, 0 for tokens without entries."""
        lead = np.zeros(self.leading.max(initial=0), rows[0].dtype)
        pieces = []
        bounds = (self.leading.tolist(), self.columns.tolist(), self.lengths.tolist())
        for row, leading, column, length in zip(rows, *bounds, strict=True):
            if leading:
                pieces.append(lead[:leading])
            pieces.append(row[column : column + length])
        return np.concatenate(pieces, dtype=dtype, casting="same_kind")

    def entry(self, position: int) -> tuple[int, int, int]:
        """Rollout, column and token of a position in the flat arrays; the column is that of row n.

        The column of a token without an entry is below `columns[n]`.
        """
        offsets = self.offsets
        n = int(np.searchsorted(offsets, position, side="right")) - 1
        token = position - int(offsets[n])
        return n, int(self.columns[n] - self.leading[n]) + token, token

    def locate(self, position: int) -> Place:
        """The place of a position in the flat arrays."""
        n, column, token = self.entry(position)
        return Place(named(self.names[n]), f"[{n}, {column}]", token)


def shown(given: Any, rows: Rows, n: int, column: int) -> Any:
    """An entry as it was given: None in a list of rows has become NaN."""
    of_list = isinstance(given, (list, tuple)) and isinstance(given[n], (list, tuple))
    return given[n][column] if of_list else rows[n][column]
