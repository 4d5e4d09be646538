"""Traces, and folders that replays are kept in."""

from collections.abc import Callable

import pytest

from bad_inputs.kind import Kind
from forkpoint.errors import ConfigError

REPLAY = ("replay", "ok.jsonl", "--model", "ok.json", "--steps", "1")


def folder_kind(
    *argv: str, message: str, prepare: Callable[[pytest.MonkeyPatch], object] | None = None
) -> Kind:
    return Kind(error=ConfigError, message=message, argv=(*REPLAY, *argv), prepare=prepare)


TRACES = (
    folder_kind(
        *("--output", "ok.jsonl"),
        message="ok.jsonl is a file; a replay is a folder. Give another path.",
    ),
    folder_kind(
        *("--max-grad-norm", "0"), message="max_grad_norm is 0.0; it takes a finite number above 0."
    ),
)
