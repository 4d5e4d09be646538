"""Checks of whole numbers in a model's configuration, which may be a file from others."""

from collections.abc import Mapping
from typing import Any

from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import short

MOST = 2**31 - 1
MOST_LAYERS = 10_000
REMEDY = "Give the config.json that save_pretrained wrote."


def size(name: str, value: object, most: int = MOST) -> int:
    """Return `value` if it is a whole number from 1 to `most`. Raises ConfigError otherwise."""
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
    """Return a required size of a configuration. Raises ConfigError if it is missing or not a
    size."""
    if config.get(name) is None:
        raise ConfigError(f"the model configuration lacks {name}. {REMEDY}")
    return size(name, config[name])


def count(config: Mapping[str, Any], name: str, default: int = 0) -> int:
    """Return an optional number of a configuration; the default if it is missing, null or 0.

    Raises ConfigError unless it is a whole number of at least 0.
    """
    value = config.get(name)
    if value is None or (value == 0 and type(value) is int):
        return default
    return size(name, value)
