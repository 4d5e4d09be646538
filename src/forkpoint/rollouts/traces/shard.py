"""A batch as one safetensors file, exactly as it was given. Imports no torch.

T tokens, N rollouts. Arrays of the file: `token_ids` int32 [T], `offsets` int64 [N + 1],
`loss_mask` bool [T], `temperatures` float64 [N], where the batch has them `old_logprobs`,
`reference_logprobs` and `old_values` float64 [T], and for `advantage`, `weights` and `returns` (see
`_numbers`) two arrays each. `loss_inputs.NAME` are arrays that the loss was given besides. Its
metadata holds, as one JSON object (several would be written in any order), the `rollout_ids`,
`group_ids` and `extras`, and which `trace` and `batch` this is.
"""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from forkpoint.errors import RolloutError, TraceError
from forkpoint.rollouts.batch import Rollout, RolloutBatch, short
from forkpoint.rollouts.formats.json_lines import parse_strictly
from forkpoint.rollouts.formats.limits import ROLLOUT_BYTES, TIMES_FILE, MemoryLimit
from forkpoint.rollouts.traces.fields import SHARD, Problem, check_fields

LOSS_INPUT = "loss_inputs."
ARRAYS = frozenset({"token_ids", "offsets", "loss_mask", "temperatures"})
"""Field that every shard has, and no file that is read as rollouts."""
_METADATA = "forkpoint"
_LENGTH_BYTES = 8
_LOGPROBS_AND_VALUES = ("old_logprobs", "reference_logprobs", "old_values")
Arrays = dict[str, NDArray[Any]]


def encode(
    batch: RolloutBatch, loss_arrays: Mapping[str, NDArray[Any]], trace: str, n: int
) -> bytes:
    """The content of the shard of batch `n` of the trace with that id.

    Raises TraceError for rollouts with routed_experts, which shards have no field for.
    """
    if batch.routed_experts is not None:
        raise TraceError(
            "the rollouts have routed_experts, which traces do not hold, so that a replay would "
            "route tokens otherwise. Leave them out, or save the rollouts with save_rollouts."
        )
    arrays: Arrays = {
        "token_ids": batch.token_ids.astype(np.int32),
        "offsets": np.asarray(batch.offsets),
        "loss_mask": np.asarray(batch.loss_mask),
        "temperatures": np.asarray(batch.temperatures),
    }
    for name in _LOGPROBS_AND_VALUES:
        values = getattr(batch, name)
        if values is not None:
            arrays[name] = np.asarray(values)
    arrays |= _numbers(batch, "advantage")
    for name in ("weights", "returns"):
        if getattr(batch, name) is not None:
            arrays |= _numbers(batch, name)
    # safetensors writes views of arrays wrongly.
    arrays |= {LOSS_INPUT + name: np.ascontiguousarray(a) for name, a in loss_arrays.items()}
    about = {
        "trace": trace,
        "batch": n,
        "rollout_ids": batch.rollout_ids,
        "group_ids": batch.group_ids,
        "extras": batch.extras,
    }
    return safetensors.numpy.save(arrays, {_METADATA: json.dumps(about, allow_nan=False)})


def bytes_of(size: int, rollouts: int, tokens: int) -> int:
    """The most bytes that it takes to read a shard of `size` bytes: its content, the rollouts, and
    the batch of them.

    Per token there are at most nine numbers of 8 bytes, in a rollout and again in the batch.
    """
    return 3 * size + 2 * ROLLOUT_BYTES * rollouts + 144 * tokens


def decode(
    content: bytes, where: str, memory: MemoryLimit
) -> tuple[RolloutBatch, Arrays, Mapping[str, Any]]:
    """The batch of a shard, the arrays that its loss was given besides, and the metadata.

    Raises TraceError, naming `where`, for content that is not a shard, and RolloutError where its
    metadata takes more memory than is left.
    """
    try:
        arrays = safetensors.numpy.load(content)
        header = content[_LENGTH_BYTES:][: int.from_bytes(content[:_LENGTH_BYTES], "little")]
        text = json.loads(header).get("__metadata__", {}).get(_METADATA, "").encode()
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a dtype that numpy lacks
        raise _no_batch(where, str(error)) from None
    memory.check(TIMES_FILE * len(text), "the metadata of a batch")
    try:
        about = parse_strictly(text)
        check_fields(about, SHARD)
        _check_arrays(arrays, about)
    except ValueError as error:
        raise _no_batch(where, str(error)) from None
    try:
        batch = RolloutBatch(_rollouts(arrays, about))
    except RolloutError as error:
        raise _no_batch(where, str(error)) from None
    extra = {
        k.removeprefix(LOSS_INPUT): v.copy() for k, v in arrays.items() if k.startswith(LOSS_INPUT)
    }
    return batch, extra, {"trace": about["trace"], "batch": about["batch"]}


def _no_batch(where: str, problem: str) -> TraceError:
    return TraceError(
        f"{where} is no batch of a trace: {problem.rstrip('.')}. Take a copy of the trace as it "
        "was recorded."
    )


def _check_arrays(arrays: Arrays, about: Mapping[str, Any]) -> None:
    """Whether there are the arrays of a batch, of their dtypes and lengths, and no others.

    Raises Problem, naming the first that is not so.
    """
    given = {name: array for name, array in arrays.items() if not name.startswith(LOSS_INPUT)}
    offsets = given.get("offsets", np.empty(0))
    if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) < 2:
        raise Problem("there are no offsets of rollouts")
    lengths = np.diff(offsets)
    if offsets[0] != 0 or (lengths < 1).any():
        raise Problem("offsets do not rise from 0")
    rollouts, tokens = len(lengths), int(offsets[-1])
    number, per_token = (np.float64, rollouts), (np.float64, tokens)
    needed: dict[str, tuple[Any, int]] = {
        "token_ids": (np.int32, tokens),
        "offsets": (np.int64, rollouts + 1),
        "loss_mask": (np.bool_, tokens),
        "temperatures": number,
    }
    for name in ("advantage", "weights", "returns"):
        numbers = given.get(f"{name}.number")
        if numbers is not None or name == "advantage":
            needed[f"{name}.number"] = number
        if numbers is not None and (numbers.dtype, numbers.shape) == (np.float64, (rollouts,)):
            needed[f"{name}.per_token"] = np.float64, int(lengths[np.isnan(numbers)].sum())
    allowed = {name: per_token for name in _LOGPROBS_AND_VALUES if name in given} | needed
    if missing := [name for name in needed if name not in given]:
        raise Problem(f"there is no {', '.join(missing)}")
    if unknown := sorted(given.keys() - allowed.keys()):
        raise Problem(f"there is {short(unknown[0])}, which no recorder writes")
    for name, (dtype, length) in allowed.items():
        found = given[name]
        if found.dtype != dtype or found.shape != (length,):
            raise Problem(
                f"{name} is {list(found.shape)} of {found.dtype}; it takes [{length}] of "
                f"{np.dtype(dtype)}"
            )
    for name in ("rollout_ids", "group_ids", "extras"):
        if len(about[name]) != rollouts:
            raise Problem(f"{name} has {len(about[name])} entries, for {rollouts} rollouts")


def _rollouts(arrays: Arrays, about: Mapping[str, Any]) -> list[Rollout]:
    offsets = arrays["offsets"].tolist()
    advantages = _one_each(arrays, "advantage")
    weights, returns = (
        _one_each(arrays, name) if f"{name}.number" in arrays else None
        for name in ("weights", "returns")
    )
    made = []
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        made.append(
            Rollout(
                token_ids=arrays["token_ids"][begin:end],
                loss_mask=arrays["loss_mask"][begin:end],
                advantage=advantages[n],
                old_logprobs=_slice(arrays, "old_logprobs", begin, end),
                reference_logprobs=_slice(arrays, "reference_logprobs", begin, end),
                weights=None if weights is None else weights[n],
                returns=None if returns is None else returns[n],
                old_values=_slice(arrays, "old_values", begin, end),
                temperature=float(arrays["temperatures"][n]),
                group_id=about["group_ids"][n],
                rollout_id=about["rollout_ids"][n],
                extras=about["extras"][n],
            )
        )
    return made


def _numbers(batch: RolloutBatch, name: str) -> Arrays:
    """A field that is a number or one per token: [N] numbers, NaN where it is one per token, and
    [] the values per token of those rollouts, back to back."""
    values = [getattr(rollout, name) for rollout in batch]
    per_token = [value for value in values if isinstance(value, np.ndarray)]
    return {
        f"{name}.number": np.array([np.nan if np.ndim(v) else v for v in values], np.float64),
        f"{name}.per_token": np.concatenate(per_token) if per_token else np.empty(0, np.float64),
    }


def _one_each(arrays: Arrays, name: str) -> list[float | NDArray[np.float64]]:
    found: list[float | NDArray[np.float64]] = []
    per_token, begin = arrays[f"{name}.per_token"], 0
    lengths = np.diff(arrays["offsets"]).tolist()
    for number, length in zip(arrays[f"{name}.number"].tolist(), lengths, strict=True):
        if number == number:
            found.append(number)
        else:
            found.append(per_token[begin : begin + length])
            begin += length
    return found


def _slice(arrays: Arrays, name: str, begin: int, end: int) -> NDArray[np.float64] | None:
    return arrays[name][begin:end] if name in arrays else None
