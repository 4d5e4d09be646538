"""Fields of a rollout as users give them: converted to numpy arrays, checked, refused by name.

Lists, numpy arrays and torch tensors of any device are read. Imports no torch: a tensor can only be
given by code that has imported it. The `read_` functions take one rollout's field: `who` is the
rollout as error messages name it, and `field` the name of what is read. The `check_` functions take
the flat entries of any number of rollouts, and `locate`, which gives the place of an entry.
"""

import reprlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import RolloutError

MAX_TOKEN_ID = 2**31 - 1
"""Kernels index vocabularies with int32; a larger id is never a token."""

MAX_EXPERT = 2**15 - 1
"""The largest number of an expert."""

LARGEST_LOGPROB = 0.125
"""The largest log-prob of a trained token. A log-prob is a logit less the logarithm of a sum, and
each may have been rounded to 16 bits: bfloat16 numbers from 16 to 32, the size of large logits,
are 1/8 apart. Values from 0 to this bound are kept, as trainers keep them in their ratios."""

GIVE_ONE = (
    "Give an ordinary tensor of this rollout alone: .to_dense() of a sparse one, .dequantize() of "
    "a quantized one, .full_tensor() of a distributed one, one part of a nested one."
)
NUMBER_OR_FLOATS = (
    "it takes one finite number, or one per token. Look for a division by 0, or for text where a "
    "number belongs, where it is made."
)
FINITE = "Its number must be finite; look for a division by 0 where the numbers are made."
FINITE_LOGPROB = (
    "The log-prob of a token that was sampled is finite; compute it again, as policy.score(batch) "
    "does, or set loss_mask to 0 at that token."
)

_MOST_BITS = 256
"""Of integers that messages show: the digits of larger ones may exceed Python's limit."""
_MOST_BYTES = 80


class _Short(reprlib.Repr):
    """Values cut short, without writing out what is large."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= _MOST_BITS else f"an integer of {x.bit_length()} bits"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x) if len(x) <= _MOST_BYTES else f"{len(x)} bytes"


_REPR = _Short()


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one entry of a field, as error messages name it.

    who: the rollout.
    index: the entry's index with its brackets, such as "[2]", or "[5, 2]" of a padded tensor.
    token: the token's number in its rollout.
    """

    who: str
    index: str
    token: int


Locate = Callable[[int], Place]
"""The place of entry i of flat entries."""


def short(value: object) -> str:
    """`value` as an error message shows it: numbers exactly, text and containers cut short."""
    if isinstance(value, np.generic):
        value = value.item()
    return _REPR.repr(value)


def named(rollout_id: str) -> str:
    """A rollout that has an id, as error messages name it."""
    return f"Rollout {short(rollout_id)}"


def within(who: str) -> Locate:
    """The places in the fields of one rollout."""
    return lambda position: Place(who, f"[{position}]", position)


def host_values(who: str, field: str, value: Any, *, give: str = GIVE_ONE) -> Any:
    """A torch tensor as a numpy array; anything else as it is.

    A tensor may have any real dtype that torch converts (bfloat16 and float8 become float64), lie
    on any device, require gradients and have any strides. It is copied to the host at once. `give`
    ends the message where it cannot be read.

    Raises RolloutError for tensors whose numbers cannot be read here (sparse, nested, quantized,
    distributed, without storage), and for numpy arrays with masked entries.
    """
    if isinstance(value, np.ndarray):
        # The type first: numpy.ma is imported when it is first looked at.
        is_plain = type(value) is np.ndarray
        if not is_plain and isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
            raise RolloutError(
                f"{who}: {field} is a numpy array with masked entries, which have no value. Fill "
                "them with .filled(0)."
            )
        # bfloat16 and float8 of the package ml_dtypes are of numpy's kind for unknown types.
        if value.dtype.kind == "V" and np.can_cast(value.dtype, np.float64):
            return value.astype(np.float64)
        return value
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    numpy_floats = (torch.float16, torch.float32, torch.float64)
    try:
        on_host = value.detach().to("cpu").resolve_conj().resolve_neg()
        if on_host.is_floating_point() and on_host.dtype not in numpy_floats:
            on_host = on_host.to(torch.float64)
        return on_host.numpy()
    # What torch raises where a tensor of another kind has no such conversion.
    except (RuntimeError, TypeError):
        kind = f"{type(value).__name__} of {value.dtype}, {value.layout}, on {value.device}"
        raise RolloutError(
            f"{who}: {field} is a {kind}, whose numbers cannot be read. {give}"
        ) from None


def read_token_ids(who: str, values: Any) -> NDArray[np.int64]:
    """Token ids, int64 [T]."""
    takes = (
        "token_ids takes a one-dimensional list or array of whole numbers from 0 to "
        f"{MAX_TOKEN_ID}. Give the ids that the model read, without padding."
    )
    array = read_vector(who, "token_ids", values, "iu", takes)
    if not array.size:
        raise RolloutError(
            f"{who}: token_ids is empty; a rollout has at least one token. Leave this rollout out."
        )
    check_token_ids("token_ids", array, within(who), takes)
    return array.astype(np.int64)


def check_token_ids(field: str, ids: np.ndarray, locate: Locate, takes: str) -> None:
    """Raises RolloutError unless all of `ids`, integers [T], are from 0 to MAX_TOKEN_ID."""
    if ids.min() >= 0 and ids.max() <= MAX_TOKEN_ID:
        return
    position = int(((ids < 0) | (ids > MAX_TOKEN_ID)).argmax())
    place = locate(position)
    raise RolloutError(f"{place.who}: {field}{place.index} is {ids[position]}; {takes}")


def read_loss_mask(who: str, values: Any, length: int) -> NDArray[np.bool_]:
    """The loss mask, bool [T], from 0 and 1 of any type."""
    takes = (
        "loss_mask takes a one-dimensional list or array of 0 and 1, or of booleans: 1 where the "
        "token is trained."
    )
    array = read_vector(who, "loss_mask", values, "biuf", takes)
    _check_length(who, "loss_mask", array, length)
    mask = check_mask("loss_mask", array, within(who), takes)
    check_first_tokens("loss_mask", mask, np.zeros(1, np.int64), within(who))
    return mask


def check_mask(field: str, values: np.ndarray, locate: Locate, takes: str) -> NDArray[np.bool_]:
    """The entries of a mask as booleans. Raises RolloutError where one is neither 0 nor 1."""
    mask = values.astype(np.bool_)
    same = values == mask
    if not same.all():
        position = int(same.argmin())
        place = locate(position)
        raise RolloutError(f"{place.who}: {field}{place.index} is {values[position]}; {takes}")
    return mask


def check_first_tokens(
    field: str, mask: NDArray[np.bool_], firsts: NDArray[np.int64], locate: Locate
) -> None:
    """Raises RolloutError where the loss mask has a first token; `firsts` are their positions."""
    trained = mask[firsts]
    if trained.any():
        place = locate(int(firsts[trained.argmax()]))
        raise RolloutError(
            f"{place.who}: {field}{place.index} is 1, but no earlier token predicts token 0. Set "
            "it to 0, or put the prompt (at least a start token) before the trained tokens."
        )


def read_floats(who: str, field: str, values: Any, mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """One number per token, float64 [T], finite at trained tokens.

    Entries of other tokens are not read: those that are not finite are stored as 0.
    """
    return _finite_where_trained(who, field, values, mask, FINITE)


def read_number_or_floats(
    who: str, field: str, value: Any, mask: NDArray[np.bool_]
) -> float | NDArray[np.float64]:
    """One number for all tokens, or one per token as in `read_floats`."""
    value = host_values(who, field, value)
    if isinstance(value, (list, tuple)) or np.ndim(value):
        return read_floats(who, field, value, mask)
    if not is_number(value) or not (np.isfinite(value) or not mask.any()):
        raise RolloutError(f"{who}: {field} is {short(value)}; {NUMBER_OR_FLOATS}")
    return float(value) if np.isfinite(value) else 0.0


def read_logprobs(
    who: str, field: str, values: Any, mask: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Log-probs, float64 [T], finite and at most LARGEST_LOGPROB at trained tokens.

    Entries of other tokens are not read, as in `read_floats`; entry 0 is stored as 0.
    """
    array = _finite_where_trained(who, field, values, mask, FINITE_LOGPROB)
    array[0] = 0.0
    check_logprobs(field, array, mask, within(who))
    return array


def check_logprobs(
    field: str, logprobs: NDArray[np.float64], mask: NDArray[np.bool_], locate: Locate
) -> None:
    """Raises RolloutError where the log-prob of a trained token is above LARGEST_LOGPROB."""
    if logprobs.max() <= LARGEST_LOGPROB:
        return
    refused = mask & (logprobs > LARGEST_LOGPROB)
    if refused.any():
        position = int(refused.argmax())
        place = locate(position)
        raise RolloutError(
            f"{place.who}: {field}{place.index} is {logprobs[position]}; the logarithm of a "
            f"probability is at most 0, and rounding to 16 bits adds at most {LARGEST_LOGPROB}. "
            "Give log-probs rather than probabilities or their negatives."
        )


def read_temperature(who: str, value: Any) -> float:
    """A finite number above 0."""
    value = host_values(who, "temperature", value)
    if isinstance(value, (list, tuple)) or not is_number(value) or not 0 < value < np.inf:
        raise RolloutError(
            f"{who}: temperature is {short(value)}; it takes one finite number above 0. Give the "
            "temperature of the sampling; for greedy decoding give 1."
        )
    return float(value)


def read_identifier(who: str, field: str, value: Any) -> str | None:
    """Text or None; a whole number becomes text."""
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


def _finite_where_trained(
    who: str, field: str, values: Any, mask: NDArray[np.bool_], advice: str
) -> NDArray[np.float64]:
    takes = (
        f"{field} takes a one-dimensional list or array of numbers, one per token. Put 0 where a "
        "token has no value."
    )
    array = read_vector(who, field, values, "iuf", takes, missing=True).astype(np.float64)
    _check_length(who, field, array, len(mask))
    given = values if isinstance(values, (list, tuple)) else array
    clear_untrained(field, array, mask, within(who), advice, lambda position: given[position])
    return array


def clear_untrained(
    field: str,
    numbers: NDArray[np.float64],
    mask: NDArray[np.bool_],
    locate: Locate,
    advice: str,
    given: Callable[[int], Any],
) -> None:
    """Set entries of untrained tokens that are not finite to 0, in place.

    Raises RolloutError, ending with `advice`, where the entry of a trained token is not finite; it
    is shown as `given` has it.
    """
    finite = np.isfinite(numbers)
    if finite.all():
        return
    refused = mask & ~finite
    if refused.any():
        position = int(refused.argmax())
        place = locate(position)
        raise RolloutError(
            f"{place.who}: {field}{place.index} is {short(given(position))}, and token "
            f"{place.token} is trained. {advice}"
        )
    numbers[~finite] = 0.0


def read_routed_experts(who: str, values: Any, length: int) -> NDArray[np.int16]:
    """Experts of each token, int16 [T, L, K].

    Given for all tokens but the last, that one's are -1.
    """
    takes = (
        f"routed_experts takes whole numbers of shape [{length}, layers, experts of a token], the "
        f"experts that token i was sent to in entry i, or [{max(length - 1, 0)}, ...] without the "
        "last token's. Where the router is to choose by itself all entries of a token in a layer "
        "are -1."
    )
    array = host_values(who, "routed_experts", values)
    if not isinstance(array, np.ndarray):
        try:
            array = np.asarray(array)
        except ValueError:  # lists of different lengths
            raise RolloutError(
                f"{who}: routed_experts has lists of different lengths; {takes}"
            ) from None
    shape = " x ".join(map(str, array.shape))
    if array.ndim != 3 or array.dtype.kind not in "iu" or 0 in array.shape[1:]:
        raise RolloutError(
            f"{who}: routed_experts is of shape ({shape}) and type {array.dtype}; {takes}"
        )
    if len(array) not in (length, length - 1):
        raise RolloutError(
            f"{who}: routed_experts has {len(array)} tokens (shape {shape}), and token_ids has "
            f"{length}; {takes}"
        )
    wrong = (array < -1) | (array > MAX_EXPERT)
    if wrong.any():
        at = tuple(int(n) for n in np.argwhere(wrong)[0])
        raise RolloutError(f"{who}: routed_experts{list(at)} is {array[at]}; {takes}")
    found = array.astype(np.int16)
    ordered = np.sort(found, axis=-1)
    free = ordered[..., -1] < 0
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & ~free
    wrong = repeated | ((ordered[..., 0] < 0) & ~free)
    if wrong.any():
        token, layer = (int(n) for n in np.argwhere(wrong)[0])
        raise RolloutError(
            f"{who}: routed_experts[{token}, {layer}] is {found[token, layer].tolist()}, which are "
            f"not different experts; {takes}"
        )
    if len(found) < length:
        last = np.full((1, *found.shape[1:]), -1, np.int16)
        found = np.concatenate([found, last])
    return found


def read_vector(
    who: str, field: str, values: Any, kinds: str, takes: str, *, missing: bool = False
) -> np.ndarray:
    """`values` as a one-dimensional array of one of numpy's `kinds`.

    Lists are looked at value by value, because numpy would turn [5, True] into [5, 1]. With
    `missing`, None in a list stands for no number and becomes NaN.
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


def _of_list(
    who: str, field: str, values: list | tuple, kinds: str, takes: str, missing: bool
) -> np.ndarray:
    given = values
    refused = {kind for kind in set(map(type, values)) if _kind(kind) not in kinds}
    if refused:
        values = [_number(who, field, value) for value in values]
        if missing:
            values = [np.nan if value is None else value for value in values]
        refused = {kind for kind in set(map(type, values)) if _kind(kind) not in kinds}
    for position, value in enumerate(values if refused else ()):
        if type(value) in refused:
            raise RolloutError(f"{who}: {field}[{position}] is {short(given[position])}; {takes}")
    array = np.array(values) if values else np.empty(0, np.int64)
    if array.dtype.kind not in kinds:  # whole numbers of more than 64 bits
        position = next(i for i, value in enumerate(values) if not -(2**63) <= value < 2**63)
        raise RolloutError(f"{who}: {field}[{position}] is {short(values[position])}; {takes}")
    return array


def _number(who: str, field: str, value: Any) -> Any:
    """The number in an array or tensor without dimensions; anything else as it is."""
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


def is_number(value: Any) -> bool:
    """Whether `value` is one integer or float; a boolean is none."""
    array = np.asarray(value)
    return array.ndim == 0 and array.dtype.kind in "iuf"


def _check_length(who: str, field: str, array: np.ndarray, length: int) -> None:
    if len(array) != length:
        raise RolloutError(
            f"{who}: {field} has {len(array)} entries, but token_ids has {length}. Every per-token "
            "array has one entry per token, and entry i belongs to token i; fill up with 0 where "
            "there is no value, as over the prompt."
        )
