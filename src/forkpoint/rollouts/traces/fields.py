"""The fields that a trace has: which there must be, their types and their ranges. Imports no torch.

Checksums say that a line is as it was sealed, and nothing of what it holds.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forkpoint.rollouts.batch import short

_MOST = 2**63 - 1
_TOKEN_BYTES = 5
"""A token's id and whether it is trained, in the file of a batch."""


class Problem(ValueError):
    """A field is missing or of another kind."""


@dataclass(frozen=True)
class Field:
    """The values that a field takes, in words, and their check."""

    takes: str
    check: Callable[[Any], bool]


def _whole(least: int) -> Field:
    return Field(f"a whole number from {least}", lambda v: type(v) is int and least <= v <= _MOST)


def _text_like(pattern: str, takes: str) -> Field:
    found = re.compile(pattern)
    return Field(takes, lambda v: isinstance(v, str) and found.fullmatch(v) is not None)


def _list_of(check: Callable[[Any], bool], takes: str) -> Field:
    return Field(takes, lambda v: isinstance(v, list) and all(map(check, v)))


_TEXT = Field("text", lambda v: isinstance(v, str))
_OBJECT = Field("an object", lambda v: isinstance(v, dict))
_SETTINGS = Field("an object or null", lambda v: v is None or isinstance(v, dict))
_SHA256 = _text_like("[0-9a-f]{64}", "64 hexadecimal digits")
_TRACE = _text_like("[0-9a-f]{32}", "32 hexadecimal digits")

HEADER: Mapping[str, Field] = {
    "kind": _TEXT,
    "schema": _whole(1),
    "forkpoint": _TEXT,
    "model_config": _SETTINGS,
    "loss": _SETTINGS,
    "optimizer": _SETTINGS,
    "notes": _SETTINGS,
    "trace": _TRACE,
    "previous": _text_like("", "empty text"),
    "checksum": _SHA256,
}
"""The first line of a manifest."""
BATCH: Mapping[str, Field] = {
    "batch": _whole(0),
    "file": _TEXT,
    "bytes": _whole(1),
    "sha256": _SHA256,
    "rollouts": _whole(1),
    "tokens": _whole(1),
    "trained_tokens": _whole(0),
    "loss_inputs": _OBJECT,
    "previous": _SHA256,
    "checksum": _SHA256,
}
"""A line of a manifest for one batch."""
SHARD: Mapping[str, Field] = {
    "trace": _TRACE,
    "batch": _whole(0),
    "rollout_ids": _list_of(lambda v: isinstance(v, str), "a list of texts"),
    "group_ids": _list_of(lambda v: v is None or isinstance(v, str), "a list of texts and nulls"),
    "extras": _list_of(lambda v: v is None or isinstance(v, dict), "a list of objects and nulls"),
}
"""The metadata of a batch's file."""


def check_fields(values: Any, fields: Mapping[str, Field]) -> None:
    """Whether `values` is an object with exactly these fields, each as it takes its values.

    Raises Problem, naming the first field that is not so.
    """
    if not isinstance(values, dict):
        raise Problem(f"there is {short(values)}, not an object")
    missing = [name for name in fields if name not in values]
    if missing:
        raise Problem(f"there is no {', '.join(missing)}")
    unknown = sorted(values.keys() - fields.keys())
    if unknown:
        raise Problem(f"there is {short(unknown[0])}, which no recorder writes")
    for name, field in fields.items():
        if not field.check(values[name]):
            raise Problem(f"{name} is {short(values[name])}; it takes {field.takes}")


def check_counts(values: Mapping[str, Any]) -> None:
    """Whether there may be a batch of the counts of a manifest's line: every rollout has a token,
    whose first is not trained, and every token has its bytes.

    Raises Problem, naming the count that cannot be.
    """
    rollouts, tokens, trained_tokens = (
        values[name] for name in ("rollouts", "tokens", "trained_tokens")
    )
    if tokens > values["bytes"] // _TOKEN_BYTES:
        raise Problem(
            f"tokens is {tokens}; a file of {values['bytes']} bytes has at most "
            f"{values['bytes'] // _TOKEN_BYTES}"
        )
    if tokens < rollouts:
        raise Problem(f"tokens is {tokens}; it takes at least one for each of {rollouts} rollouts")
    if trained_tokens > tokens - rollouts:
        raise Problem(
            f"trained_tokens is {trained_tokens}; of {tokens} tokens in {rollouts} rollouts, whose "
            f"first are not trained, it takes at most {tokens - rollouts}"
        )
