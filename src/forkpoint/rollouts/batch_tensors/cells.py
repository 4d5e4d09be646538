"""Per-token fields of one or many rollouts: read as rows of entries, validated all at once.

Arrays and tensors [N, W], lists of N rows, nested tensors, and flat values are read. An array or a
tensor is copied to the host at once. Checks run over the flat entries of all rollouts.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.fields import MAX_TOKEN_ID, host_values, is_number, read_vector, short

LARGEST_LOGPROB = 0.125
"""The largest log-prob of a trained token. A log-prob is a logit less the logarithm of a sum, and
each may have been rounded to 16 bits: bfloat16 numbers from 16 to 32, the size of large logits,
are 1/8 apart. Values from 0 to this bound are kept, as trainers keep them in their ratios."""

WHO = "The batch"
IDS = f"whole numbers from 0 to {MAX_TOKEN_ID}, the ids that the model read"
GIVE = (
    "Give an ordinary tensor: .to_dense() of a sparse one, .dequantize() of a quantized one, "
    ".full_tensor() of a distributed one."
)
FINITE = "Its number must be finite; look for a division by 0 where the numbers are made."
FINITE_LOGPROB = (
    "The log-prob of a token that was sampled is finite; compute it again, as policy.score(batch) "
    "does, or set loss_mask to 0 at that token."
)
NUMBER_OR_FLOATS = (
    "it takes one finite number, or one per token. Look for a division by 0, or for text where a "
    "number belongs, where it is made."
)
Rows = Sequence[np.ndarray] | np.ndarray
"""Row n holds the entries of rollout n: an array [N, W], or N one-dimensional arrays."""


# Rows of entries --------------------------------------------------------------------------------


def shape_text(shape: Sequence[int]) -> str:
    """A shape as error messages show it: "2 x 3"."""
    return " x ".join(map(str, shape)) or "no dimensions"


def on_host(field: str, values: Any) -> Any:
    """Tensors as numpy arrays, nested tensors as a list of rows, anything else as it is.

    Raises RolloutError where the numbers of a tensor cannot be read.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor) and values.is_nested:
        return _of_nested(torch, field, values)
    values = host_values(WHO, field, values, give=GIVE)
    if isinstance(values, np.ndarray) and values.dtype.kind == "O":
        return values.tolist()
    return values


def _of_nested(torch: Any, field: str, values: Any) -> list[np.ndarray]:
    """The rows of a nested tensor [N, j], in one copy to the host."""
    if values.dim() != 2:
        raise RolloutError(
            f"{WHO}: {field} is a nested tensor of {values.dim()} dimensions; it takes one number "
            "per token: two dimensions, the rollouts and their tokens."
        )
    values = values.detach()
    if values.layout == torch.jagged and values.lengths() is None:
        offsets, flat = values.offsets(), values.values()
    else:  # without the gaps of a narrowed one
        parts = values.unbind()
        lengths = [len(part) for part in parts]
        offsets, flat = torch.tensor([0, *lengths]).cumsum(0), torch.cat(parts)
    flat = host_values(WHO, field, flat, give=GIVE)
    return split_rows(flat, host_values(WHO, field, offsets, give=GIVE))


def dimensions(values: Any) -> int:
    """The dimensions of values on the host: those of a list as its first entry shows them."""
    if not isinstance(values, (list, tuple)):
        return np.ndim(values)
    if not values or isinstance(values[0], str):
        return 1
    if isinstance(values[0], (list, tuple)):
        return 2
    return 1 + np.ndim(host_values(WHO, "an entry", values[0], give=GIVE))


def read_rows(field: str, values: Any, kinds: str, takes: str, *, missing: bool = False) -> Rows:
    """Rows of numbers of one of numpy's `kinds`, from what `on_host` returned.

    With `missing`, None in a list stands for no number and becomes NaN.
    """
    if isinstance(values, (list, tuple)):
        return [
            read_vector(WHO, f"{field}[{n}]", row, kinds, takes, missing=missing)
            for n, row in enumerate(values)
        ]
    array = np.asarray(values)
    if array.ndim == 0:
        raise RolloutError(f"{WHO}: {field} is {short(values)}; {takes}")
    if array.ndim != 2:
        raise RolloutError(f"{WHO}: {field} has the shape {shape_text(array.shape)}; {takes}")
    if array.dtype.kind not in kinds and array.size:
        raise RolloutError(f"{WHO}: {field}[0, 0] is {short(array[0, 0])} ({array.dtype}); {takes}")
    return array


def read_matrix(
    field: str, values: Any, kinds: str, takes: str, *, missing: bool = False
) -> np.ndarray:
    """An array [N, W], as `read_rows`; rows of different lengths are refused."""
    rows = read_rows(field, values, kinds, takes, missing=missing)
    if isinstance(rows, np.ndarray):
        return rows
    for n, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise RolloutError(
                f"{WHO}: {field}[0] has {len(rows[0])} entries and {field}[{n}] has {len(row)}; "
                f"{takes} RolloutBatch.from_jagged takes rows of different lengths."
            )
    return np.stack(rows) if rows else np.empty((0, 0), np.int64)


def split_rows(values: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    """The rows `values[offsets[n] : offsets[n + 1]]`."""
    return [values[begin:end] for begin, end in pairwise(offsets.tolist())]


# The entries of tokens --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """The entries of per-token fields that belong to tokens, and the tokens without entries.

    Rollout n consists of `leading[n]` tokens that the fields have no entries for, such as a prompt
    where fields are over completions, and of the entries `columns[n] : columns[n] + lengths[n]` of
    row n.

    whose: the rollouts as error messages name them, such as "Rollout 'a'".
    columns, lengths, leading: int64 [N].
    like: the field whose shape the others must have.
    advice: what to do with fields of another shape.
    width: the columns W of fields [N, W]; None of jagged fields, whose rows have `lengths` entries.
    single: whether fields are vectors, of one rollout alone.
    offsets: int64 [N + 1], the starts of the rollouts in the flat arrays, and T.
    """

    whose: Sequence[str]
    columns: NDArray[np.int64]
    lengths: NDArray[np.int64]
    leading: NDArray[np.int64]
    like: str
    advice: str
    width: int | None = None
    single: bool = False
    offsets: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        offsets = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.leading + self.lengths, out=offsets[1:])
        object.__setattr__(self, "offsets", offsets)

    @property
    def who(self) -> str:
        """The rollout, or the batch, as error messages name it."""
        return self.whose[0] if self.single else WHO

    @property
    def takes(self) -> str:
        """The shapes of a per-token field, for error messages."""
        if self.single:
            return "one per token, in a one-dimensional list or array"
        if self.width is not None:
            return f"[{len(self.whose)}, {self.width}] as {self.like}, one row per rollout"
        return f"a nested tensor, a list of rows, or flat values, each as long as {self.like}"

    def rows(self, field: str, values: Any, kinds: str, takes: str, *, missing: bool) -> Rows:
        """The rows of a per-token field, from values on the host.

        Raises RolloutError for other shapes than those that the tokens have.
        """
        if self.width is not None:
            matrix = read_matrix(field, values, kinds, takes, missing=missing)
            if matrix.shape != (len(self.whose), self.width):
                raise RolloutError(
                    f"{WHO}: {field} has the shape {shape_text(matrix.shape)}, but {self.like} has "
                    f"{len(self.whose)} x {self.width}. {self._rule}"
                )
            return matrix
        if self.single or dimensions(values) == 1:
            flat = read_vector(self.who, field, values, kinds, takes, missing=missing)
            self._check_length(self.who, field, len(flat), int(self.lengths.sum()))
            if self.single:
                return [flat]
            return split_rows(flat, np.concatenate([[0], np.cumsum(self.lengths)]))
        rows = read_rows(field, values, kinds, takes, missing=missing)
        if len(rows) != len(self.whose):
            raise RolloutError(
                f"{WHO}: {field} has {len(rows)} rows, but {self.like} has {len(self.whose)}."
            )
        for who, row, length in zip(self.whose, rows, self.lengths.tolist(), strict=True):
            self._check_length(who, field, len(row), length)
        return rows

    def gather(self, rows: Rows, dtype: DTypeLike | None = None) -> np.ndarray:
        """The entries as a flat array [T] of `dtype`, 0 for tokens without entries; a copy."""
        if self.single:
            return rows[0].astype(rows[0].dtype if dtype is None else dtype)
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
        n = int(np.searchsorted(self.offsets, position, side="right")) - 1
        token = position - int(self.offsets[n])
        return n, int(self.columns[n] - self.leading[n]) + token, token

    def refuse(
        self,
        field: str,
        refused_T: NDArray[np.bool_],
        values_T: Sequence[Any] | NDArray[Any],
        rule: str,
    ) -> None:
        """Raises RolloutError, with the value and `rule`, at the first entry that is refused.

        "{token}" in the rule becomes the token's number in its rollout.
        """
        if refused_T.any():
            position = int(refused_T.argmax())
            n, column, token = self.entry(position)
            index = f"[{column}]" if self.single else f"[{n}, {column}]"
            value = short(values_T[position])
            raise RolloutError(
                f"{self.whose[n]}: {field}{index} is {value}{rule.replace('{token}', str(token))}"
            )

    @property
    def _rule(self) -> str:
        return (
            "Every per-token field has one entry per token of these, and it belongs to that "
            f"token. {self.advice}"
        )

    def _check_length(self, who: str, field: str, found: int, wanted: int) -> None:
        if found != wanted:
            raise RolloutError(
                f"{who}: {field} has {found} entries, but {self.like} has {wanted}. {self._rule}"
            )


def cells_of_one(who: str, length: int) -> Cells:
    """The entries of the fields of one rollout of this many tokens."""
    return Cells(
        whose=(who,),
        columns=np.zeros(1, np.int64),
        lengths=np.array([length]),
        leading=np.zeros(1, np.int64),
        like="token_ids",
        advice="Fill up with 0 where there is no value, as over the prompt.",
        single=True,
    )


# Fields -----------------------------------------------------------------------------------------


def token_ids_of(cells: Cells, field: str, rows: Rows) -> NDArray[np.int64]:
    """Token ids, int64 [T]; raises RolloutError unless all are from 0 to MAX_TOKEN_ID."""
    ids = cells.gather(rows)
    cells.refuse(field, (ids < 0) | (ids > MAX_TOKEN_ID), ids, f"; it takes {IDS}.")
    return ids.astype(np.int64, copy=False)


def loss_mask_of(
    cells: Cells, field: str, values: Any, *, padding: bool = False
) -> NDArray[np.bool_]:
    """The loss mask, bool [T], from 0 and 1 of any type.

    With `padding`, the padding of a matrix may hold ones, and is not read.
    """
    takes = f"it takes 0 and 1, or booleans: 1 where the token is trained, {cells.takes}."
    values = values if cells.single else on_host(field, values)
    rows = cells.rows(field, values, "biuf", takes, missing=False)
    flat = cells.gather(rows)
    mask = flat.astype(np.bool_)
    cells.refuse(field, flat != mask, flat, f"; {takes}")
    if isinstance(rows, np.ndarray) and cells.width is not None and not padding:
        _refuse_trained_padding(cells, field, rows, int(np.count_nonzero(mask)))
    refuse_first_tokens(cells, field, mask)
    return mask


def refuse_first_tokens(cells: Cells, field: str, mask: NDArray[np.bool_]) -> None:
    """Raises RolloutError where the loss mask has the first token of a rollout."""
    refused = np.zeros_like(mask)
    firsts = cells.offsets[:-1]
    refused[firsts] = mask[firsts]
    cells.refuse(
        field,
        refused,
        mask.view(np.int8),
        ", but no earlier token predicts token 0. Set it to 0, or put the prompt (at least a start "
        "token) before the trained tokens.",
    )


def _refuse_trained_padding(cells: Cells, field: str, rows: np.ndarray, inside: int) -> None:
    if np.count_nonzero(rows) == inside:
        return
    columns = np.arange(rows.shape[1])
    ends = cells.columns + cells.lengths
    padding = (columns < cells.columns[:, None]) | (columns >= ends[:, None])
    n, column = divmod(int((padding & (rows != 0)).argmax()), rows.shape[1])
    raise RolloutError(
        f"{cells.whose[n]}: {field}[{n}, {column}] is {rows[n, column]}, where there is padding: "
        f"the tokens of row {n} go from column {cells.columns[n]} to {ends[n] - 1}. Set it to 0, "
        "or multiply the loss mask with the attention mask."
    )


class FloatReader:
    """Reads fields of floats. Of untrained tokens, those that are not finite are stored as 0.

    numbers: the fields that were one number per rollout, N floats each.
    """

    def __init__(self, cells: Cells, loss_mask: NDArray[np.bool_]) -> None:
        self.cells: Cells = cells
        self.loss_mask: NDArray[np.bool_] = loss_mask
        self.offsets: NDArray[np.int64] = cells.offsets
        self.numbers: dict[str, list[float]] = {}

    def floats(self, field: str, values: Any, advice: str = FINITE) -> NDArray[np.float64] | None:
        """One number per token: float64 [T], or None."""
        if values is None:
            return None
        takes = f"it takes numbers, {self.cells.takes}."
        return self._floats(field, self._host(field, values), advice, takes)

    def logprobs(self, field: str, values: Any) -> NDArray[np.float64] | None:
        """Log-probs, float64 [T], 0 at first tokens; or None."""
        logprobs = self.floats(field, values, FINITE_LOGPROB)
        if logprobs is not None:
            logprobs[self.offsets[:-1]] = 0.0
            self.cells.refuse(
                field,
                self.loss_mask & (logprobs > LARGEST_LOGPROB),
                logprobs,
                "; the logarithm of a probability is at most 0, and rounding to 16 bits adds at "
                f"most {LARGEST_LOGPROB}. Give log-probs rather than probabilities or their "
                "negatives.",
            )
        return logprobs

    def number_or_floats(self, field: str, values: Any) -> NDArray[np.float64] | None:
        """One number per rollout, repeated over its tokens, or one per token: float64 [T]; or None.

        A column [N, 1] is one number per rollout. A single number is that of all rollouts.
        """
        if values is None:
            return None
        cells, count = self.cells, len(self.cells.whose)
        values = self._host(field, values)
        takes = f"it takes one number per rollout, [{count}], or one per token, {cells.takes}."
        depth = dimensions(values)
        if depth == 0:
            if not is_number(values):
                rule = NUMBER_OR_FLOATS if cells.single else takes
                raise RolloutError(f"{cells.who}: {field} is {short(values)}; {rule}")
            return self._per_rollout(field, np.full(count, values, np.float64), "")
        if cells.single:
            return self._floats(field, values, FINITE, f"it takes numbers, {cells.takes}.")
        column = isinstance(values, np.ndarray) and values.shape == (count, 1)
        if column:
            values = values[:, 0]
        elif depth == 1:
            self._refuse_ambiguous(field, len(values))
        if column or (depth == 1 and (cells.width is not None or len(values) == count)):
            vector = read_vector(WHO, field, values, "iuf", takes)
            if len(vector) != count:
                raise RolloutError(
                    f"{WHO}: {field} has the shape {shape_text(vector.shape)}; {takes}"
                )
            return self._per_rollout(field, vector.astype(np.float64), "[{}]")
        return self._floats(field, values, FINITE, takes)

    def _host(self, field: str, values: Any) -> Any:
        single = self.cells.single
        return host_values(self.cells.who, field, values) if single else on_host(field, values)

    def _refuse_ambiguous(self, field: str, entries: int) -> None:
        """Refuses flat entries that could be one per rollout or one per token of a response."""
        cells = self.cells
        as_many = entries == len(cells.whose) == cells.lengths.sum()
        if cells.width is None and as_many and (cells.lengths != 1).any():
            raise RolloutError(
                f"{WHO}: {field} has {entries} entries, and there are as many rollouts as tokens "
                "of responses, so that they could belong to either. Give one number per rollout "
                "as an array [N, 1], or one per token as a list of rows."
            )

    def _per_rollout(
        self, field: str, numbers: NDArray[np.float64], index: str
    ) -> NDArray[np.float64]:
        finite = np.isfinite(numbers)
        if not finite.all():
            refused = np.logical_or.reduceat(self.loss_mask, self.offsets[:-1]) & ~finite
            if refused.any():
                n = int(refused.argmax())
                raise RolloutError(
                    f"{self.cells.whose[n]}: {field}{index.format(n)} is {numbers[n]}; "
                    f"{NUMBER_OR_FLOATS}"
                )
            numbers[~finite] = 0.0
        self.numbers[field] = numbers.tolist()
        return np.repeat(numbers, np.diff(self.offsets))

    def _floats(self, field: str, given: Any, advice: str, takes: str) -> NDArray[np.float64]:
        cells = self.cells
        floats = cells.gather(cells.rows(field, given, "iuf", takes, missing=True), np.float64)
        finite = np.isfinite(floats)
        if not finite.all():
            refused = self.loss_mask & ~finite
            if refused.any():
                position = int(refused.argmax())
                n, column, _ = cells.entry(position)
                row = given if cells.single else given[n] if dimensions(given) == 2 else None
                shown: list[Any] = floats.tolist()
                if isinstance(row, (list, tuple)):  # whose None has become NaN
                    shown[position] = row[column]
                rule = f", and token {{token}} is trained. {advice}"
                cells.refuse(field, refused, shown, rule)
            floats[~finite] = 0.0
        return floats
