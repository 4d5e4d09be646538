"""One recorded batch as a safetensors file. Imports no torch.

Arrays are `rollouts.N.FIELD` (a field of rollout N), `loss_inputs.NAME` (a loss input), and
`media.SHA256.INPUT` (an input of an image or video). The array `json`, uint8, is JSON text with the
other fields of each rollout, the other loss inputs, and whether the batch has advantages.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import Rollout, RolloutBatch, short
from forkpoint.rollouts.files import encode_arrays, media_entries
from forkpoint.rollouts.formats.limits import ROLLOUT_BYTES, TIMES_FILE, MemoryLimit
from forkpoint.rollouts.media import Absent
from forkpoint.rollouts.media_entries import MediaEntries
from forkpoint.rollouts.rollout import store
from forkpoint.rollouts.schema import SchemaError, parse_json, read

Arrays = dict[str, NDArray[Any]]

ARRAYS = frozenset({"json", "rollouts.0.token_ids"})
"""Names of arrays that identify a batch file."""


@dataclass(frozen=True)
class _Json:
    rollouts: tuple[dict[str, Any], ...]
    loss_inputs: dict[str, Any]
    has_advantages: bool = True


def encode(batch: RolloutBatch, loss_arrays: Arrays, loss_values: Mapping[str, Any]) -> bytes:
    """Encode a batch as the content of a file.

    Args:
        batch: the rollouts.
        loss_arrays: the loss inputs that are arrays, by name.
        loss_values: the other loss inputs, as JSON values.
    """
    arrays = {f"loss_inputs.{name}": value for name, value in loss_arrays.items()}
    others: list[dict[str, Any]] = [{} for _ in batch]
    media: Arrays = {}
    for number, rollout in enumerate(batch):
        for name in (field.name for field in fields(Rollout)):
            value = getattr(rollout, name)
            if name == "token_ids":
                value = value.astype(np.int32)
            if name == "media":
                value = media_entries(rollout, number, media)
            if isinstance(value, np.ndarray):
                arrays[f"rollouts.{number}.{name}"] = value
            elif value is not None:
                others[number][name] = value
    arrays |= {f"media.{name}": value for name, value in media.items()}
    values: dict[str, Any] = {"rollouts": others, "loss_inputs": loss_values}
    if not batch.has_advantages:  # other files are the same as before this field existed
        values["has_advantages"] = False
    text = json.dumps(values, sort_keys=True)
    arrays["json"] = np.frombuffer(text.encode(), np.uint8)
    return encode_arrays(arrays)


def decode(content: bytes, memory: MemoryLimit) -> tuple[RolloutBatch, dict[str, Any]]:
    """Read the batch and the loss inputs of a file.

    Raises:
        SchemaError: the content is not a batch.
        RolloutError: the batch exceeds the memory limit.
    """
    try:
        arrays = safetensors.numpy.load(content)
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a dtype that numpy lacks
        raise SchemaError(str(error)) from None
    text = arrays.pop("json", np.empty(0, np.uint8)).tobytes()
    memory.check(TIMES_FILE * len(text), "the JSON of a batch")
    values = read(_Json, parse_json(text), "json")
    rollouts, loss_inputs = values.rollouts, values.loss_inputs
    tokens = sum(ids.size for name, ids in arrays.items() if name.endswith(".token_ids"))
    # A token has at most nine numbers of 8 bytes, in the rollout and again in the batch.
    taken_bytes = 4 * len(content) + 2 * ROLLOUT_BYTES * len(rollouts) + 144 * tokens
    memory.check(taken_bytes, "a batch")
    pixels: Arrays = {}
    for name, value in arrays.items():
        kind, _, rest = name.partition(".")
        number, _, field = rest.partition(".")
        if kind == "rollouts" and number.isdecimal() and int(number) < len(rollouts):
            rollouts[int(number)][field] = value
        elif kind == "loss_inputs":
            loss_inputs[rest] = value.copy()
        elif kind == "media":
            pixels[rest] = value
        else:
            raise SchemaError(f"the array {short(name)} is unknown")

    def array_of(name: str, _: Absent) -> NDArray[Any]:
        if name not in pixels:
            raise SchemaError(f"the array media.{short(name)} is missing")
        return pixels[name]  # the hash of the medium covers shapes, dtypes and values

    media = MediaEntries(array_of, memory)
    for number, rollout in enumerate(rollouts):
        if "media" in rollout:
            rollout["media"] = media.read(rollout["media"], f"rollouts[{number}].media")
    try:
        batch = RolloutBatch(Rollout(**rollout) for rollout in rollouts)
    except (RolloutError, TypeError) as error:  # TypeError: missing or unknown fields
        raise SchemaError(str(error)) from None
    store(batch, has_advantages=values.has_advantages)
    return batch, loss_inputs
