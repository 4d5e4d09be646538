"""Data that a trace keeps besides rollouts: settings as JSON, loss inputs as arrays or JSON.

Imports no torch.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import short


def settings_of(model: Any, loss: Any, optimizer: Any, notes: Any) -> dict[str, Any]:
    """Settings of training in the trace's header, as JSON."""
    # A model has its configuration as .config, and a configuration is made a dict by .to_dict().
    config = getattr(model, "config", model)
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if hasattr(optimizer, "param_groups"):
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        optimizer = {"name": type(optimizer).__name__, "groups": groups}
    if is_dataclass(loss) and not isinstance(loss, type):
        values = {field.name: getattr(loss, field.name) for field in fields(loss)}
        loss = {"name": type(loss).__name__, **values}
    settings = {"model_config": config, "loss": loss, "optimizer": optimizer, "notes": notes}
    kept: dict[str, Any] = {}
    for name, value in settings.items():
        if value is not None and not isinstance(value, Mapping):
            argument = name.removesuffix("_config")
            raise ConfigError(
                f"{argument} is {short(value)} of type {type(value).__name__}, whose settings are "
                "not known. Give them as a mapping."
            )
        kept[name] = _as_json(value, name)
    return kept


def split_inputs(inputs: Mapping[str, Any]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Loss inputs that are arrays, and the others as JSON."""
    arrays: dict[str, NDArray[Any]] = {}
    values: dict[str, Any] = {}
    for name, value in inputs.items():
        if not isinstance(name, str):
            raise ConfigError(f"a loss input is named {short(name)}; names are text.")
        if hasattr(value, "__array__") and np.ndim(value):
            array = _array(value, name)
            if array.dtype.kind not in "biuf":
                raise ConfigError(
                    f"the loss input {name!r} is an array of {array.dtype}; it takes booleans, "
                    "whole numbers and floats."
                )
            arrays[name] = array
        else:
            values[name] = _as_json(value, f"the loss input {name!r}")
    return arrays, values


def _array(value: Any, name: str) -> NDArray[Any]:
    """An array, or the numbers of a tensor, wherever it is and whatever hangs on it."""
    torch = sys.modules.get("torch")  # there is no tensor where it has not been imported
    if torch is not None and isinstance(value, torch.Tensor):
        if value.is_nested or value.layout != torch.strided or value.is_meta:
            raise ConfigError(
                f"the loss input {name!r} is a tensor on {value.device} of the layout "
                f"{'nested' if value.is_nested else value.layout}; it takes dense tensors that "
                "hold numbers. Give value.to_dense(), or a list of numbers."
            )
        value = value.detach().cpu()
        known = (torch.float16, torch.float32, torch.float64)
        if value.dtype.is_floating_point and value.dtype not in known:  # numpy has no others
            value = value.float()
    return np.asarray(value)


def _as_json(value: Any, what: str) -> Any:
    """`value` as JSON gives it back."""
    try:
        return json.loads(json.dumps(value, default=_plain, allow_nan=True), parse_constant=str)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} is {short(value)}, which JSON cannot keep: {error}. Give numbers, text, "
            "booleans, None, lists and mappings of these."
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__array__") and np.ndim(value) == 0:  # numpy's scalars, and torch's
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{short(value)} of type {type(value).__name__}")
