"""Conversion of single values and vectors to numpy, with errors that name the field.

Values may be lists, numpy arrays and torch tensors on any device. Imports no torch. `who` is the
name of the rollout in error messages.
"""

import reprlib
import sys
from typing import Any

import numpy as np

from forkpoint.errors import RolloutError

MAX_TOKEN_ID = 2**31 - 1
"""Largest token id, because kernels index vocabularies with int32."""

_MOST_BITS = 256
"""Largest number of bits of integers that messages show. Python may refuse to print larger ones."""
_MOST_BYTES = 80


class _Short(reprlib.Repr):
    """Shortens values for messages, without formatting large values whole."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= _MOST_BITS else f"an integer of {x.bit_length()} bits"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x) if len(x) <= _MOST_BYTES else f"{len(x)} bytes"

    def repr_instance(self, x: object, level: int) -> str:
        """One line, also for models, configurations and arrays."""
        return " ".join(super().repr_instance(x, level).split())


_REPR = _Short()


def short(value: object) -> str:
    """Format a value for an error message: numbers exactly, text and containers shortened."""
    if isinstance(value, np.generic):
        value = value.item()
    return _REPR.repr(value)


def named(rollout_id: str) -> str:
    """Name of a rollout with an id, for error messages."""
    return f"Rollout {short(rollout_id)}"


def host_values(who: str, field: str, value: Any) -> Any:
    """Convert a torch tensor to a numpy array; return other values unchanged.

    A tensor may have any real dtype that torch converts (bfloat16 and float8 become float32), be
    on any device, require gradients and have any strides. It is copied to the host at once.

    Raises RolloutError for tensors whose numbers cannot be read (sparse, nested, quantized,
    distributed, without storage), and for numpy arrays with masked entries.
    """
    if isinstance(value, np.ndarray):
        # The type is checked first, because access to numpy.ma imports it.
        is_plain = type(value) is np.ndarray
        if not is_plain and isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
            raise RolloutError(
                f"{who}: {field} is a numpy array with masked entries, which have no value. Fill "
                "them with .filled(0)."
            )
        # bfloat16 and float8 of the package ml_dtypes have numpy's kind for unknown types.
        if value.dtype.kind == "V" and np.can_cast(value.dtype, np.float32):
            return value.astype(np.float32)
        return value
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    numpy_floats = (torch.float16, torch.float32, torch.float64)
    try:
        on_host = value.detach().to("cpu").resolve_conj().resolve_neg()
        if on_host.is_floating_point() and on_host.dtype not in numpy_floats:
            on_host = on_host.float()
        return on_host.numpy()
    # torch raises these for tensors without such a conversion.
    except (RuntimeError, TypeError):
        kind = f"{type(value).__name__} of {value.dtype}, {value.layout}, on {value.device}"
        raise RolloutError(
            f"{who}: {field} is a {kind}, whose numbers cannot be read. Give an ordinary tensor: "
            ".to_dense() of a sparse one, .dequantize() of a quantized one, .full_tensor() of a "
            "distributed one, one part of a nested one."
        ) from None


def read_temperature(who: str, value: Any) -> float:
    """Read a temperature: a finite number above 0."""
    value = host_values(who, "temperature", value)
    listed = isinstance(value, (list, tuple))
    if listed or not is_number(value) or not 0 < as_float(value) < np.inf:
        raise RolloutError(
            f"{who}: temperature is {short(value)}; it takes one finite number above 0. Give the "
            "temperature of the sampling; for greedy decoding give 1."
        )
    return float(value)


def read_identifier(who: str, field: str, value: Any) -> str | None:
    """Read an id: text or None. A whole number becomes text."""
    value = host_values(who, field, value)
    if value is None:
        return None
    if isinstance(value, str):
        return str(value)
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return str(int(value))
    raise RolloutError(
        f"{who}: {field} is {short(value)}; it takes text, a whole number or None. "
        "Write it as text."
    )


def read_vector(
    who: str, field: str, values: Any, kinds: str, takes: str, *, missing: bool = False
) -> np.ndarray:
    """Read a one-dimensional array of one of numpy's `kinds`.

    Each value of a list is checked, because numpy would convert [5, True] to [5, 1]. With
    `missing`, None in a list becomes NaN.
    """
    values = host_values(who, field, values)
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind == "O":
        values = values.tolist()
    if isinstance(values, (list, tuple)):
        return _of_list(who, field, values, kinds, takes, missing)
    array = np.asarray(values)
    if array.ndim == 0:
        raise RolloutError(f"{who}: {field} is {short(values)}; {takes}")
    if array.ndim > 1:
        shape = " x ".join(map(str, array.shape))
        raise RolloutError(f"{who}: {field} has {array.ndim} dimensions ({shape}); {takes}")
    if array.dtype.kind not in kinds and array.size:
        raise RolloutError(f"{who}: {field}[0] is {short(array[0])} ({array.dtype}); {takes}")
    return array


def read_mask(who: str, field: str, values: Any, takes: str) -> np.ndarray:
    """Read a mask of booleans, or of numbers 0 and 1: bool [n]."""
    given = read_vector(who, field, values, "biuf", takes)
    refuse_where(who, field, (given != 0) & (given != 1), given, f"; {takes}")
    return given.astype(np.bool_)


def refuse_where(who: str, field: str, refused: np.ndarray, values: Any, rule: str) -> None:
    """Raises RolloutError for the first refused value. `rule` ends the message."""
    if refused.any():
        at = int(refused.argmax())
        raise RolloutError(f"{who}: {field}[{at}] is {short(values[at])}{rule}")


def _of_list(
    who: str, field: str, given: list | tuple, kinds: str, takes: str, missing: bool
) -> np.ndarray:
    values = given
    if any(_kind(of_type) not in kinds for of_type in set(map(type, values))):
        values = [_number(who, field, value) for value in values]
        if missing:
            values = [np.nan if value is None else value for value in values]
        for position, value in enumerate(values):
            if _kind(type(value)) not in kinds:
                shown = short(given[position])
                raise RolloutError(f"{who}: {field}[{position}] is {shown}; {takes}")
    array = np.array(values) if values else np.empty(0, np.int64)
    if array.dtype.kind not in kinds:  # whole numbers of more than 64 bits
        position = next(i for i, value in enumerate(values) if not -(2**63) <= value < 2**63)
        raise RolloutError(f"{who}: {field}[{position}] is {short(values[position])}; {takes}")
    return array


def _number(who: str, field: str, value: Any) -> Any:
    """The number in an array or tensor without dimensions; other values unchanged."""
    value = host_values(who, field, value)
    if isinstance(value, np.generic) and np.dtype(type(value)).kind == "V":
        value = host_values(who, field, np.asarray(value))
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _kind(value_type: type) -> str:
    """numpy's letter for the kind of a Python or numpy scalar type; "O" for anything else."""
    for scalar, letter in ((bool, "b"), (int, "i"), (float, "f")):
        if issubclass(value_type, scalar):
            return letter
    return np.dtype(value_type).kind if issubclass(value_type, np.generic) else "O"


def as_float(value: Any) -> float:
    """Convert a number to a float: inf if it is too large, such as a long double can be."""
    try:
        return float(value)
    except OverflowError:
        return np.inf if value > 0 else -np.inf


def is_number(value: Any) -> bool:
    """Whether `value` is an integer or a float, and not a boolean."""
    array = np.asarray(value)
    return array.ndim == 0 and array.dtype.kind in "iuf"
