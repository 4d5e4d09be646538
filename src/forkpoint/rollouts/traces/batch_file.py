"""One recorded batch as a safetensors file. Imports no torch.

`rollouts.N.FIELD` is a field of rollout N that is an array, `loss_inputs.NAME` a loss input that is
one. `json` uint8 holds everything else as JSON: for each rollout its other fields, and the loss
inputs that are no arrays.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import Rollout, RolloutBatch, short
from forkpoint.rollouts.formats.limits import ROLLOUT_BYTES, TIMES_FILE, MemoryLimit
from forkpoint.rollouts.schema import SchemaError, array, mapping, parse_json, record

Arrays = dict[str, NDArray[Any]]

ARRAYS = frozenset({"json", "rollouts.0.token_ids"})
"""Arrays that every batch file has, and no other file of rollouts."""
_OBJECT = mapping(lambda value, _: value)
_JSON = record({"rollouts": array(_OBJECT), "loss_inputs": _OBJECT})


def encode(batch: RolloutBatch, loss_arrays: Arrays, loss_values: Mapping[str, Any]) -> bytes:
    """The content of the file of a batch.

    Args:
        batch: the rollouts.
        loss_arrays: the loss inputs that are arrays, by name.
        loss_values: the other loss inputs, as JSON returns them.
    """
    arrays = {f"loss_inputs.{name}": value for name, value in loss_arrays.items()}
    others: list[dict[str, Any]] = [{} for _ in batch]
    for number, rollout in enumerate(batch):
        for name in (field.name for field in fields(Rollout)):
            value = getattr(rollout, name)
            if name == "token_ids":
                value = value.astype(np.int32)
            if isinstance(value, np.ndarray):
                arrays[f"rollouts.{number}.{name}"] = value
            elif value is not None:
                others[number][name] = value
    text = json.dumps({"rollouts": others, "loss_inputs": loss_values}, sort_keys=True)
    arrays["json"] = np.frombuffer(text.encode(), np.uint8)
    # safetensors writes the memory of a view, not its elements.
    return safetensors.numpy.save({n: np.ascontiguousarray(a) for n, a in arrays.items()})


def decode(content: bytes, memory: MemoryLimit) -> tuple[RolloutBatch, dict[str, Any]]:
    """The batch and the loss inputs of a file.

    Raises:
        SchemaError: the content is no batch.
        RolloutError: it takes more memory than is left.
    """
    try:
        arrays = safetensors.numpy.load(content)
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a dtype that numpy lacks
        raise SchemaError(str(error)) from None
    text = arrays.pop("json", np.empty(0, np.uint8)).tobytes()
    memory.check(TIMES_FILE * len(text), "the JSON of a batch")
    values = _JSON(parse_json(text), "json")
    rollouts, loss_inputs = values["rollouts"], values["loss_inputs"]
    tokens = sum(ids.size for name, ids in arrays.items() if name.endswith(".token_ids"))
    # Nine numbers of 8 bytes per token at most, in a rollout and again in the batch.
    taken_bytes = 4 * len(content) + 2 * ROLLOUT_BYTES * len(rollouts) + 144 * tokens
    memory.check(taken_bytes, "a batch")
    for name, value in arrays.items():
        kind, _, rest = name.partition(".")
        number, _, field = rest.partition(".")
        if kind == "rollouts" and number.isdecimal() and int(number) < len(rollouts):
            rollouts[int(number)][field] = value
        elif kind == "loss_inputs":
            loss_inputs[rest] = value.copy()
        else:
            raise SchemaError(f"the array {short(name)} is unknown")
    try:
        return RolloutBatch(Rollout(**rollout) for rollout in rollouts), loss_inputs
    except (RolloutError, TypeError) as error:  # TypeError: fields that are missing or unknown
        raise SchemaError(str(error)) from None
