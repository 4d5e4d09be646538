"""Formats of trainers: the names of their fields, and which entries belong to which tokens."""

from collections.abc import Iterable

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.formats import chat as chat
from forkpoint.rollouts.formats.record import Format as Format
from forkpoint.rollouts.formats.trainers import FORMATS as FORMATS


def format_named(name: str) -> Format:
    """The format of that name. Raises ConfigError if there is none."""
    if name not in FORMATS:
        raise ConfigError(f"format is {short(name)}; allowed are {', '.join(FORMATS)}.")
    return FORMATS[name]


def detect(keys: Iterable[str], where: str) -> Format:
    """The format of a record with these keys.

    Raises RolloutError if it is of none, or might be of several.
    """
    found = frozenset(key for key in keys if isinstance(key, str))
    fits = [format for format in FORMATS.values() if format.matches(found)]
    if len(fits) == 1:
        return fits[0]
    if fits:
        names = " or ".join(format.name for format in fits)
        raise RolloutError(f"{where}: may be of format {names}. Say which (format=, --format).")
    if "token_ids" in found:
        return FORMATS["forkpoint"]  # which says what is missing
    raise RolloutError(
        f"{where} is of no format that is known; its keys are {short(sorted(found))}. Formats are "
        f"{', '.join(FORMATS)}. Rename the keys to token_ids, loss_mask, advantage, or name the "
        "format (format=, --format) to see what it lacks."
    )
