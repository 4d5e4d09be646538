"""Whole numbers of a model's configuration, which may come from a file of anybody."""

from collections.abc import Mapping
from typing import Any

from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import short

MOST = 2**31 - 1
MOST_LAYERS = 10_000
REMEDY = "Give the config.json that save_pretrained wrote."


def size(name: str, value: object, most: int = MOST) -> int:
    """`value`, if it is a whole number from 1 to `most`; raises ConfigError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{name} is {short(value)}; it takes a whole number of at least 1. {REMEDY}"
        )
    if value > most:
        raise ConfigError(
            f"{name} is {short(value)}; it takes a whole number of at most {most}. {REMEDY}"
        )
    return value


def needed(config: Mapping[str, Any], name: str) -> int:
    """A size that a configuration must have. Raises ConfigError where it is missing or none."""
    if config.get(name) is None:
        raise ConfigError(f"the model configuration lacks {name}. {REMEDY}")
    return size(name, config[name])


def count(config: Mapping[str, Any], name: str, default: int = 0) -> int:
    """A number that a configuration may leave out, or have as null or 0: then the default.

    Raises ConfigError for anything but whole numbers of at least 0.
    """
    value = config.get(name)
    if value is None or (value == 0 and type(value) is int):
        return default
    return size(name, value)
