"""Formats of trainers: names of fields, and the tokens to which entries belong."""

from collections.abc import Iterable

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.formats import chat as chat
from forkpoint.rollouts.formats.record import Format as Format
from forkpoint.rollouts.formats.trainers import FORMATS as FORMATS


def format_named(name: str) -> Format:
    """Find a format by its name. Raises ConfigError if there is none."""
    if name not in FORMATS:
        raise ConfigError(f"format is {short(name)}; allowed are {', '.join(FORMATS)}.")
    return FORMATS[name]


def detect(keys: Iterable[str], where: str) -> Format:
    """Find the format of a record by its keys.

    Raises RolloutError if no format or several formats match.
    """
    found = frozenset(key for key in keys if isinstance(key, str))
    fits = [format for format in FORMATS.values() if format.matches(found)]
    if len(fits) == 1:
        return fits[0]
    if fits:
        names = " or ".join(format.name for format in fits)
        raise RolloutError(f"{where}: the format may be {names}. Set it (format=, --format).")
    if "token_ids" in found:
        return FORMATS["forkpoint"]  # whose reader names the missing key
    raise RolloutError(
        f"{where} has no known format; its keys are {short(sorted(found))}. Formats are "
        f"{', '.join(FORMATS)}. Rename the keys to token_ids, loss_mask, advantage, or set the "
        "format (format=, --format) to see which keys are missing."
    )
