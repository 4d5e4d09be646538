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
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from forkpoint.errors import TraceError
from forkpoint.rollouts import Rollout, RolloutBatch

LOSS_INPUT = "loss_inputs."
ARRAYS = frozenset({"token_ids", "offsets", "loss_mask", "temperatures"})
"""What every shard has, and no file that is read as rollouts."""
_METADATA = "forkpoint"
Arrays = dict[str, NDArray[Any]]


def encode(
    batch: RolloutBatch, loss_arrays: Mapping[str, NDArray[Any]], trace: str, n: int
) -> bytes:
    """The content of the shard of batch `n` of the trace with that id."""
    arrays: Arrays = {
        "token_ids": batch.token_ids.astype(np.int32),
        "offsets": np.asarray(batch.offsets),
        "loss_mask": np.asarray(batch.loss_mask),
        "temperatures": np.asarray(batch.temperatures),
    }
    for name in ("old_logprobs", "reference_logprobs", "old_values"):
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


def decode(content: bytes, where: str) -> tuple[RolloutBatch, Arrays, Mapping[str, Any]]:
    """The batch of a shard, the arrays that its loss was given besides, and the metadata.

    Raises TraceError, naming `where`, for content that is not a shard.
    """
    try:
        arrays = safetensors.numpy.load(content)
        about = _about(content)
        batch = RolloutBatch(_rollouts(arrays, about))
    except (SafetensorError, KeyError, ValueError, TypeError, IndexError) as error:
        raise TraceError(
            f"{where} is no batch of a trace: {type(error).__name__}: {error}. Take a copy of the "
            "trace as it was recorded."
        ) from None
    extra = {k.removeprefix(LOSS_INPUT): v for k, v in arrays.items() if k.startswith(LOSS_INPUT)}
    return batch, extra, about


def _about(content: bytes) -> dict[str, Any]:
    # safetensors gives metadata back of files alone, not of bytes.
    length = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_METADATA])


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
