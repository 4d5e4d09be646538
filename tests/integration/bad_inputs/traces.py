"""Traces, and folders that replays are kept in."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import forked_batch

from bad_inputs.kind import Kind
from forkpoint import load_rollouts
from forkpoint.apps.cli import main
from forkpoint.errors import ConfigError, ForkpointError, RolloutError, TraceError
from forkpoint.rollouts.disk import lock_folder
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


def without_a_line() -> None:
    recorded()
    path = Path("trace/manifest.jsonl")
    first, _, last = path.read_text().splitlines(keepends=True)
    path.write_text(first + last)


def adding(loss_inputs: Any) -> None:
    with record("trace") as recorder:
        recorder.add(BATCH, loss_inputs)


def without_the_end() -> None:
    recorded()
    path = Path("trace/manifest.jsonl")
    path.write_text(path.read_text().splitlines(keepends=True)[0])


def closed() -> None:
    with record("trace") as recorder:
        recorder.add(BATCH)
    recorder.add(BATCH)


def replayed(_: pytest.MonkeyPatch) -> None:
    """A finished replay in the folder out, made quietly."""
    with open(os.devnull, "w") as nothing, pytest.MonkeyPatch.context() as patch:  # noqa: PTH123
        patch.setattr("sys.stdout", nothing)
        assert main([*REPLAY, "--output", "out"]) == 0


HELD: list[object] = []
"""Locks that are held while a test runs."""


def held(folder: str) -> None:
    """A folder that another writer has locked."""
    Path(folder).mkdir(exist_ok=True)
    HELD.append(lock_folder(Path(folder)))


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
        "A folder that holds no trace",
        lambda: open_trace("folder"),
        prepare=lambda: Path("folder").mkdir(),
        message="folder is no trace: there is no manifest.jsonl in it.",
    ),
    Kind(
        name="A trace without batches",
        error=TraceError,
        message="trace has no whole batch yet. Wait until its recorder has added one, or record",
        argv=("plan", "trace"),
        prepare=lambda _: record("trace").close(),
    ),
    Kind(
        name="A file out of a trace",
        error=RolloutError,
        message="trace/batch-000001.safetensors is a part of a trace, which is read as a whole.",
        prepare=lambda _: recorded(),
        call=lambda: load_rollouts("trace/batch-000001.safetensors"),
        argv=("plan", "trace/batch-000001.safetensors"),
    ),
    trace_kind(
        "A file in place of a folder to record into",
        lambda: record("ok.jsonl"),
        message="ok.jsonl is a file; a trace is a folder. Give another path.",
    ),
    trace_kind(
        "Something else than a path",
        nameless,
        message="path is None of type NoneType; it takes the path of a folder, as text or a",
        error=ConfigError,
    ),
    trace_kind(
        "A folder to record into that is in use",
        lambda: record("trace"),
        prepare=recorded,
        message="trace is not empty: it holds 'batch-000000.safetensors'.",
    ),
    trace_kind(
        "A folder that is being recorded into",
        lambda: record("trace", resume=True),
        prepare=lambda: held("trace"),
        message="another recorder writes into trace; a trace has one recorder at a time.",
    ),
    trace_kind(
        "A batch for a recorder that is closed",
        closed,
        message="the recorder of trace is closed. Add batches inside the with block, or go on",
    ),
    trace_kind(
        "A manifest that lacks a line",
        lambda: open_trace("trace"),
        prepare=without_a_line,
        message="trace/manifest.jsonl, line 2: file is 'batch-000001.safetensors', not",
    ),
    trace_kind(
        "A manifest that lacks its end",
        lambda: open_trace("trace"),
        prepare=without_the_end,
        message="trace/manifest.jsonl lists 0 batches, and the folder has 2:",
    ),
    trace_kind(
        "A line of a manifest that lacks a field",
        lambda: open_trace("trace"),
        prepare=lambda: edited(bytes=None),
        message="trace/manifest.jsonl, line 2: bytes is missing;",
    ),
    trace_kind(
        "A field of a manifest of another type",
        lambda: open_trace("trace"),
        prepare=lambda: edited(trained_tokens="two"),
        message="trace/manifest.jsonl, line 2: trained_tokens is 'two';",
    ),
    trace_kind(
        "A trace of an earlier format",
        lambda: open_trace("trace"),
        prepare=old,
        message="trace is a trace of schema 1, written by forkpoint '0.1.0.dev0';",
    ),
    trace_kind(
        "A batch added by a forked process",
        forked,
        message="the recorder of trace belongs to process 4711, and this process was forked from",
    ),
    trace_kind(
        "Loss inputs without names",
        lambda: adding([0.5]),
        message="loss_inputs is [0.5] of type list; it takes a mapping of names to values, such",
        error=ConfigError,
    ),
    trace_kind(
        "A loss input that is a sparse tensor",
        lambda: adding({"mask": torch.eye(2).to_sparse()}),
        message="The batch: the loss input 'mask' is a Tensor of torch.float32, torch.sparse_coo,",
        error=RolloutError,
    ),
    folder_kind(
        "A folder that holds a replay already",
        *("--output", "out"),
        prepare=replayed,
        message="out holds a replay already. Add --resume to go on with it, or give another",
    ),
    folder_kind(
        "A folder that a replay is writing",
        *("--output", "out", "--resume"),
        prepare=lambda _: held("out"),
        message="another replay writes into out; a folder has one at a time.",
    ),
    folder_kind(
        "A folder that holds something else",
        *("--output", "out"),
        prepare=lambda _: (Path("out").mkdir(), Path("out/notes.txt").write_text("mine")),
        message="out holds no replay, but 1 other files, among them notes.txt.",
    ),
    folder_kind(
        "A file in place of a folder for a replay",
        *("--output", "ok.jsonl"),
        message="ok.jsonl is a file; a replay is a folder. Give another path.",
    ),
    folder_kind(
        "A replay that goes on with other options",
        *("--output", "out", "--resume", "--lr", "1"),
        prepare=replayed,
        message="the replay in out was begun with other input:",
    ),
    folder_kind(
        "Checkpoints without a folder",
        *("--checkpoint-every", "1"),
        message="checkpoint_every needs a folder to keep things in; add --output DIR.",
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
