"""One recorded batch as a safetensors file. Imports no torch.

`rollouts.N.FIELD` is a field of rollout N that is an array, `loss_inputs.NAME` a loss input that is
one. `json` uint8 holds everything else as JSON: for each rollout its other fields, and the loss
inputs that are no arrays.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import Rollout, RolloutBatch, short
from forkpoint.rollouts.files import REQUIRED
from forkpoint.rollouts.formats.limits import ROLLOUT_BYTES, TIMES_FILE, MemoryLimit
from forkpoint.rollouts.schema import SchemaError, array, mapping, parse_json, record

Arrays = dict[str, NDArray[Any]]

ARRAYS = frozenset({"json", "rollouts.0.token_ids"})
"""Arrays that every batch file has, and no other file of rollouts."""
_FIELDS = {field.name for field in fields(Rollout)}
_OBJECT = mapping(lambda value, _: value)
_JSON = record({"rollouts": array(_OBJECT), "loss_inputs": _OBJECT})


def as_json(value: Any) -> Any:
    """`value` as JSON returns it: tuples as lists, infinities and NaN as their names.

    Raises TypeError or ValueError for a value that JSON cannot hold.
    """
    return json.loads(json.dumps(value, default=_plain), parse_constant=str)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__array__") and np.ndim(value) == 0:  # scalars of numpy and of torch
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{short(value)} is of type {type(value).__name__}")


def encode(batch: RolloutBatch, loss_arrays: Arrays, loss_values: Mapping[str, Any]) -> bytes:
    """The content of the file of a batch.

    Args:
        batch: the rollouts.
        loss_arrays: the loss inputs that are arrays, by name.
        loss_values: the other loss inputs, as `as_json` returns them.
    """
    # safetensors writes the memory of a view, not its elements.
    arrays = {f"loss_inputs.{n}": np.ascontiguousarray(a) for n, a in loss_arrays.items()}
    others: list[dict[str, Any]] = []
    for number, rollout in enumerate(batch):
        values = {name: getattr(rollout, name) for name in _FIELDS}
        values["token_ids"] = rollout.token_ids.astype(np.int32)
        given = {name: value for name, value in values.items() if value is not None}
        others.append({n: v for n, v in given.items() if not isinstance(v, np.ndarray)})
        arrays |= {
            f"rollouts.{number}.{name}": np.ascontiguousarray(value)
            for name, value in given.items()
            if isinstance(value, np.ndarray)
        }
    text = json.dumps({"rollouts": others, "loss_inputs": loss_values}, sort_keys=True)
    return safetensors.numpy.save({**arrays, "json": np.frombuffer(text.encode(), np.uint8)})


def decode(
    content: bytes, rollouts: int, tokens: int, memory: MemoryLimit
) -> tuple[RolloutBatch, dict[str, Any]]:
    """The batch and the loss inputs of a file.

    Args:
        content: of the file.
        rollouts: how many rollouts it has to hold.
        tokens: how many tokens they have to have.
        memory: the limit on what reading takes.

    Raises:
        SchemaError: the content is no batch, or none of that size.
        RolloutError: it takes more memory than is left.
    """
    # Nine numbers of 8 bytes per token at most, in a rollout and again in the batch.
    memory.check(4 * len(content) + 2 * ROLLOUT_BYTES * rollouts + 144 * tokens, "a batch")
    try:
        arrays = safetensors.numpy.load(content)
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a dtype that numpy lacks
        raise SchemaError(str(error)) from None
    text = arrays.pop("json", np.empty(0, np.uint8)).tobytes()
    memory.check(TIMES_FILE * len(text), "the JSON of a batch")
    values = _JSON(parse_json(text), "json")
    found, loss_inputs = values["rollouts"], values["loss_inputs"]
    given = sum(a.size for name, a in arrays.items() if name.endswith(".token_ids"))
    if (len(found), given) != (rollouts, tokens):
        raise SchemaError(
            f"it has {len(found)} rollouts with {given} tokens, and the manifest says {rollouts} "
            f"with {tokens}"
        )
    for name, value in arrays.items():
        kind, _, rest = name.partition(".")
        number, _, field = rest.partition(".")
        if kind == "rollouts" and number.isdecimal() and int(number) < rollouts:
            found[int(number)][field] = value
        elif kind == "loss_inputs":
            loss_inputs[rest] = value.copy()
        else:
            raise SchemaError(f"the array {short(name)} is unknown")
    for rollout in found:
        if missing := [name for name in REQUIRED if name not in rollout]:
            raise SchemaError(f"a rollout has no {missing[0]}")
        if unknown := rollout.keys() - _FIELDS:
            raise SchemaError(f"a rollout has {short(min(unknown))}, which is no field")
    try:
        return RolloutBatch(Rollout(**rollout) for rollout in found), loss_inputs
    except RolloutError as error:
        raise SchemaError(str(error)) from None
