"""Formats of trainers: the names of their fields, and which entries belong to which tokens.

A format is a function from a record (one sample) to a rollout. Per-token entries are moved to the
token that they belong to, and padding goes, so that equal prompts share from the first token on.
Imports no torch.
"""

from collections.abc import Iterable

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.formats.base import Format as Format
from forkpoint.rollouts.formats.nemo_rl import NEMO_RL
from forkpoint.rollouts.formats.openrlhf import OPENRLHF
from forkpoint.rollouts.formats.own import FORKPOINT
from forkpoint.rollouts.formats.prime_rl import PRIME_RL
from forkpoint.rollouts.formats.record import RecordError
from forkpoint.rollouts.formats.skyrl import SKYRL
from forkpoint.rollouts.formats.slime import SLIME
from forkpoint.rollouts.formats.trl import TRL, TRL_ASYNC
from forkpoint.rollouts.formats.verl import VERL, VERL_TEXT

FORMATS = {
    format.name: format
    for format in (
        *(FORKPOINT, VERL, VERL_TEXT, TRL, TRL_ASYNC, OPENRLHF, NEMO_RL, PRIME_RL, SLIME, SKYRL),
    )
}


def named(name: str) -> Format:
    """The format of that name. Raises ConfigError where there is none."""
    if name not in FORMATS:
        raise ConfigError(f"format is {short(name)}; allowed are {', '.join(FORMATS)}.")
    return FORMATS[name]


def detect(keys: Iterable[str], where: str) -> Format:
    """The format that a record with these keys is of.

    Raises RolloutError where it is of none, or might be of several.
    """
    found = _names(keys)
    fits = _likely(found)
    if not fits and "token_ids" in found:
        return FORKPOINT  # which says what is missing
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise RolloutError(
            f"{where}: may be of format {' or '.join(format.name for format in fits)}. Say which "
            "(format=, --format)."
        )
    known = "; ".join(
        f"{format.name}: {' or '.join(', '.join(sorted(s)) for s in format.signatures)}"
        for format in FORMATS.values()
        if format is not FORKPOINT
    )
    raise RolloutError(
        f"{where} is of no format that is known; its keys are {short(sorted(found))}. forkpoint's "
        f"own has token_ids, loss_mask, advantage. Known by their keys are {known}. Rename the "
        "keys, or name the format (format=, --format) to see what it lacks."
    )


def of_another_format(error: RecordError, format: Format, keys: Iterable[str]) -> RecordError:
    """The error of a record that was read as the format that was asked for, saying so where its
    keys are not of that one."""
    others = _likely(keys)
    if format in others:
        return error
    seen = " or ".join(repr(other.name) for other in others) or "of no format that is known"
    text = f"{error} It was read as {format.name!r}, as asked, and by its keys it is {seen}."
    return RecordError.of(RolloutError(text), error.field)


def _likely(keys: Iterable[str]) -> list[Format]:
    found = _names(keys)
    return [format for format in FORMATS.values() if format.matches(found)]


def _names(keys: Iterable[str]) -> frozenset[str]:
    return frozenset(key for key in keys if isinstance(key, str))
