"""Where a model is, and its shape for the planner. Imports no torch."""

from pathlib import Path

from forkpoint.apps.cli.options import Device, Memory
from forkpoint.errors import ConfigError
from forkpoint.hosts.model_files import check_family as check_family
from forkpoint.hosts.model_files import config_path as config_path
from forkpoint.hosts.model_files import read_config as read_config
from forkpoint.hosts.model_files import shape_of_model
from forkpoint.plan import MODELS, ModelShape, known_name
from forkpoint.plan.device_memory import DeviceMemory, total_parameters

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


def device_of(options: Device, model: Path | None, shape: ModelShape | None) -> DeviceMemory | None:
    """The device that is planned for; None where none was given.

    Raises ConfigError where one was given and nothing is known of bytes.
    """
    if shape is None or model is None:
        if options.device_memory is not None:
            raise ConfigError(
                f"device_memory is {options.device_memory}, but without a model bytes cannot be "
                "predicted. Add --model Qwen/Qwen3-8B, say."
            )
        return None
    return options.memory(read_parameters(model, shape), shape.dtype_bytes)


def read_parameters(model: Path, shape: ModelShape) -> int:
    """The number of a model's parameters, of a configuration or of a model by name, whose shape
    `read_shape` has read."""
    name = None if model.exists() else known_name(str(model))
    config = read_config(config_path(model)) if name is None else MODELS[name]
    return total_parameters(config, shape)


def read_shape(model: Path, options: Memory) -> ModelShape:
    """The sizes that FLOPs and bytes are counted from: of a configuration, or of a model by name.

    A folder or file of that name comes first; a name is then one that `known_name` knows.

    Raises ConfigError where the configuration does not say them, and for what is neither; and
    UnsupportedError for a family that forkpoint does not know, whose cost it cannot count.
    """
    sizes = {
        "dtype_bytes": DTYPE_BYTES[options.dtype],
        "checkpointed": options.gradient_checkpointing,
    }
    return shape_of_model(model, **sizes)
