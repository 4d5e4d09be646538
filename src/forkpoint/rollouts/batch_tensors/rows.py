"""Fields of a whole batch as users give them, read as one row of entries per rollout.

Arrays and tensors [N, W], lists of N rows, and nested tensors are read. An array or a tensor is
copied to the host at once.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from forkpoint.errors import RolloutError
from forkpoint.rollouts.fields import host_values, read_vector, short

WHO = "The batch"
GIVE = (
    "Give an ordinary tensor: .to_dense() of a sparse one, .dequantize() of a quantized one, "
    ".full_tensor() of a distributed one."
)
Rows = Sequence[np.ndarray] | np.ndarray
"""Row n holds the entries of rollout n: an array [N, W], or N one-dimensional arrays."""


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


def dimensions(values: Any) -> int:
    """The dimensions of what `on_host` returned: those of a list as its first entry shows them."""
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
    rows = read_rows(field, on_host(field, values), kinds, takes, missing=missing)
    if isinstance(rows, np.ndarray):
        return rows
    if not rows:
        return np.empty((0, 0), np.int64)
    for n, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise RolloutError(
                f"{WHO}: {field}[0] has {len(rows[0])} entries and {field}[{n}] has {len(row)}; "
                f"{takes} RolloutBatch.from_jagged takes rows of different lengths."
            )
    return np.stack(rows)


def split_rows(values: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    """The rows `values[offsets[n] : offsets[n + 1]]`."""
    bounds = offsets.tolist()
    return [values[begin:end] for begin, end in pairwise(bounds)]


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
