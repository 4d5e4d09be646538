"""Traces, and folders that replays are kept in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from steps import forked_batch

from bad_inputs.kind import Kind
from forkpoint.errors import ConfigError, ForkpointError, TraceError
from forkpoint.rollouts.traces import open_trace, record

REPLAY = ("replay", "ok.jsonl", "--model", "ok.json", "--steps", "1")
BATCH = forked_batch()


def trace_kind(
    name: str,
    call: Callable[[], object],
    *,
    message: str,
    prepare: Callable[[], object] | None = None,
    error: type[ForkpointError] = TraceError,
) -> Kind:
    return Kind(
        name=name,
        error=error,
        message=message,
        call=call,
        prepare=(lambda _: prepare()) if prepare else None,
    )


def folder_kind(
    name: str,
    *argv: str,
    message: str,
    prepare: Callable[[pytest.MonkeyPatch], object] | None = None,
) -> Kind:
    return Kind(
        name=name,
        error=ConfigError,
        message=message,
        argv=(*REPLAY, *argv),
        prepare=prepare,
    )


def recorded() -> None:
    """A trace of two batches in the folder trace."""
    with record("trace") as recorder:
        recorder.add(BATCH)
        recorder.add(BATCH)


def edited(**changes: Any) -> None:
    """A trace with other settings."""
    recorded()
    path = Path("trace/trace.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


TRACES = (
    trace_kind(
        "A setting of a trace of another type",
        lambda: open_trace("trace"),
        prepare=lambda: edited(notes="two"),
        message="trace/trace.json: notes is 'two';",
    ),
    folder_kind(
        "A file in place of a folder for a replay",
        *("--output", "ok.jsonl"),
        message="ok.jsonl is a file; a replay is a folder. Give another path.",
    ),
    folder_kind(
        "A schedule shorter than its warm-up",
        *("--schedule", "linear", "--warmup-steps", "5"),
        message="steps is 1 and warmup_steps 5; the schedule 'linear' needs more steps than the",
    ),
    folder_kind(
        "A gradient norm of 0",
        *("--max-grad-norm", "0"),
        message="max_grad_norm is 0.0; it takes a finite number above 0.",
    ),
)
