"""Traces, and folders that replays are kept in."""

import json
import os
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


def nameless() -> None:
    nothing: Any = None
    record(nothing)


def adding(loss_inputs: Any) -> None:
    with record("trace") as recorder:
        recorder.add(BATCH, loss_inputs)


def closed() -> None:
    with record("trace") as recorder:
        recorder.add(BATCH)
    recorder.add(BATCH)


def edited(**changes: Any) -> None:
    """A trace with other fields in the line of its first batch; None removes one."""
    recorded()
    path = Path("trace/manifest.jsonl")
    header, line, rest = path.read_text().split("\n", 2)
    values = {**json.loads(line), **changes}
    line = json.dumps({k: v for k, v in values.items() if v is not None})
    path.write_text("\n".join([header, line, rest]))


def old() -> None:
    """A trace of the first format."""
    recorded()
    path = Path("trace/manifest.jsonl")
    header, rest = path.read_text().split("\n", 1)
    values = {**json.loads(header), "schema": 1, "forkpoint": "0.1.0.dev0"}
    path.write_text(json.dumps(values) + "\n" + rest)


def forked() -> None:
    """A recorder that belongs to another process."""
    with record("trace") as recorder:
        recorder._process = 4711
        try:
            recorder.add(BATCH)
        finally:
            recorder._process = os.getpid()


TRACES = (
    trace_kind(
        "A field of a manifest of another type",
        lambda: open_trace("trace"),
        prepare=lambda: edited(trained_tokens="two"),
        message="trace/manifest.jsonl, line 2: trained_tokens is 'two';",
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
