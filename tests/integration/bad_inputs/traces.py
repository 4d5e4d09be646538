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
from forkpoint.rollouts.traces import open_trace, record
from forkpoint.rollouts.traces.disk import lock_folder

REPLAY = ("replay", "ok.jsonl", "--model", "ok.json", "--steps", "1")
BATCH = forked_batch()


def trace_kind(
    name: str,
    call: Callable[[], object],
    *,
    message: str,
    means: str,
    remedy: str,
    prepare: Callable[[], object] | None = None,
    error: type[ForkpointError] = TraceError,
) -> Kind:
    return Kind(
        name=name,
        error=error,
        message=message,
        means=means,
        remedy=remedy,
        call=call,
        prepare=(lambda _: prepare()) if prepare else None,
    )


def folder_kind(
    name: str,
    *argv: str,
    message: str,
    means: str,
    remedy: str,
    prepare: Callable[[pytest.MonkeyPatch], object] | None = None,
) -> Kind:
    return Kind(
        name=name,
        error=ConfigError,
        message=message,
        means=means,
        remedy=remedy,
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
        message="folder is no trace: there is no manifest.jsonl in it. Give the folder that was "
        "given to forkpoint.record.",
        means="The folder is another one, or recording has not begun.",
        remedy="Give the folder that was recorded into.",
    ),
    Kind(
        name="A trace without batches",
        error=TraceError,
        message="trace has no whole batch yet. Wait until its recorder has added one, or record "
        "again.",
        means="Recording has begun, and ended or not, and nothing was added.",
        remedy="Look at what records; a batch is there once add has returned.",
        argv=("plan", "trace"),
        prepare=lambda _: record("trace").close(),
    ),
    Kind(
        name="A file out of a trace",
        error=RolloutError,
        message="trace/batch-000001.safetensors is a part of a trace, which is read as a whole. "
        "Give its folder, trace.",
        means="Its arrays lie as the trace needs them, and the manifest has their checksums.",
        remedy="Give the folder.",
        prepare=lambda _: recorded(),
        call=lambda: load_rollouts("trace/batch-000001.safetensors"),
        argv=("plan", "trace/batch-000001.safetensors"),
    ),
    trace_kind(
        "A file in place of a folder to record into",
        lambda: record("ok.jsonl"),
        message="ok.jsonl is a file; a trace is a folder. Give another path.",
        means="A trace has a file for every batch, and one that lists them.",
        remedy="Give a name that is not taken.",
    ),
    trace_kind(
        "Something else than a path",
        nameless,
        message="path is None of type NoneType; it takes the path of a folder, as text or a "
        "pathlib.Path.",
        means="Nothing says where. Often a setting or an environment variable is missing.",
        remedy="Give the path; load_rollouts, save_rollouts and open_trace take the same.",
        error=ConfigError,
    ),
    trace_kind(
        "A folder to record into that is in use",
        lambda: record("trace"),
        prepare=recorded,
        message="trace is not empty: it holds 'batch-000000.safetensors'. Give an empty or new "
        "folder, or resume=True to go on with a trace.",
        means="Batches of two runs would be mixed.",
        remedy="resume=True goes on with the same run; otherwise give a new folder.",
    ),
    trace_kind(
        "A folder that is being recorded into",
        lambda: record("trace", resume=True),
        prepare=lambda: held("trace"),
        message="another recorder writes into trace; a trace has one recorder at a time. Close "
        "that one or end its process, or record into another folder.",
        means="Both would write batches of the same numbers.",
        remedy="Of several ranks let one record, or give each a folder of its own.",
    ),
    trace_kind(
        "A batch for a recorder that is closed",
        closed,
        message="the recorder of trace is closed. Add batches inside the with block, or go on with "
        "record(path, resume=True).",
        means="The trace was finished when its with block ended.",
        remedy="Add the batch inside the block.",
    ),
    trace_kind(
        "A manifest that lacks a line",
        lambda: open_trace("trace"),
        prepare=without_a_line,
        message="trace/manifest.jsonl, line 2: file is 'batch-000001.safetensors', not "
        "batch-000000.safetensors. Take a copy of the trace as it was recorded.",
        means="Lines are in the order of the batches, and every batch has one.",
        remedy="Copy the trace again; nothing in it is to be edited.",
    ),
    trace_kind(
        "A manifest that lacks its end",
        lambda: open_trace("trace"),
        prepare=without_the_end,
        message="trace/manifest.jsonl lists 0 batches, and the folder has 2: lines are missing at "
        "its end. Take a copy of the trace as it was recorded.",
        means="A batch has its line before the next one is written, so at most one file is ahead.",
        remedy="Copy the trace again, the manifest last if it is still being recorded.",
    ),
    trace_kind(
        "A line of a manifest that lacks a field",
        lambda: open_trace("trace"),
        prepare=lambda: edited(bytes=None),
        message="trace/manifest.jsonl, line 2: bytes is missing; it has to be there. Take a copy "
        "of the trace as it was recorded.",
        means="No recorder wrote the line.",
        remedy="Take the trace as it was recorded.",
    ),
    trace_kind(
        "A field of a manifest of another type",
        lambda: open_trace("trace"),
        prepare=lambda: edited(trained_tokens="two"),
        message="trace/manifest.jsonl, line 2: trained_tokens is 'two'; it takes a whole number "
        "from 0 to 9007199254740992. Take a copy of the trace as it was recorded.",
        means="No recorder wrote the line.",
        remedy="Take the trace as it was recorded.",
    ),
    trace_kind(
        "A trace of an earlier format",
        lambda: open_trace("trace"),
        prepare=old,
        message="trace is a trace of schema 1, written by forkpoint '0.1.0.dev0'; this forkpoint "
        "reads schema 2. Read it with that version, or record again.",
        means="The format changed.",
        remedy="Read it with load_rollouts of that version and write it with save_rollouts, whose "
        "files every version reads; or record again.",
    ),
    trace_kind(
        "A batch added by a forked process",
        forked,
        message="the recorder of trace belongs to process 4711, and this process was forked from "
        "it. Add batches in that process, or record into another folder.",
        means="Parent and child would write batches of the same numbers.",
        remedy="Send the batch to the parent, or call record in the child, with another folder.",
    ),
    trace_kind(
        "Loss inputs without names",
        lambda: adding([0.5]),
        message="loss_inputs is [0.5] of type list; it takes a mapping of names to values, such as "
        '{"scale": 0.5}.',
        error=ConfigError,
        means="A replay gives them back to the loss by name.",
        remedy="Name them as the loss does.",
    ),
    trace_kind(
        "A loss input that is a sparse tensor",
        lambda: adding({"mask": torch.eye(2).to_sparse()}),
        message="the loss input 'mask' is a tensor on cpu of the layout torch.sparse_coo; it takes "
        "dense tensors that hold numbers. Give value.to_dense(), or a list of numbers.",
        error=ConfigError,
        means="Tensors are kept as arrays of numbers.",
        remedy="Give value.to_dense().",
    ),
    folder_kind(
        "A folder that holds a replay already",
        *("--output", "out"),
        prepare=replayed,
        message="out holds a replay already. Add --resume to go on with it, or give another "
        "folder.",
        means="Its rows would be mixed with those of this replay.",
        remedy="--resume goes on with it; otherwise give a new folder.",
    ),
    folder_kind(
        "A folder that a replay is writing",
        *("--output", "out", "--resume"),
        prepare=lambda _: held("out"),
        message="another replay writes into out; a folder has one at a time. Wait until that one "
        "ends or end its process, or give another folder.",
        means="Each would cut off the rows of the other.",
        remedy="Resume once that process has ended; its lock ends with it.",
    ),
    folder_kind(
        "A folder that holds something else",
        *("--output", "out"),
        prepare=lambda _: (Path("out").mkdir(), Path("out/notes.txt").write_text("mine")),
        message="out holds no replay, but 1 other files, among them notes.txt. Give an empty or a "
        "new folder.",
        means="Files of yours might be overwritten.",
        remedy="Give a new folder.",
    ),
    folder_kind(
        "A file in place of a folder for a replay",
        *("--output", "ok.jsonl"),
        message="ok.jsonl is a file; a replay is a folder. Give another path.",
        means="A replay keeps several files.",
        remedy="Give a name that is not taken.",
    ),
    folder_kind(
        "A replay that goes on with other options",
        *("--output", "out", "--resume", "--lr", "1"),
        prepare=replayed,
        message="the replay in out was begun with other input:\n"
        "  optimizer.lr was 1e-05 and is now 1.0\n"
        "Resume with what it was begun with, or begin anew in another folder.",
        means="Half of its steps would be of another training.",
        remedy="Take the options that it was begun with, which its manifest.json has.",
    ),
    folder_kind(
        "Checkpoints without a folder",
        *("--checkpoint-every", "1"),
        message="checkpoint_every needs a folder to keep things in; add --output DIR.",
        means="There is nowhere to keep them.",
        remedy="--output names a folder.",
    ),
    folder_kind(
        "A schedule shorter than its warm-up",
        *("--schedule", "linear", "--warmup-steps", "5"),
        message="steps is 1 and warmup_steps 5; the schedule 'linear' needs more steps than the "
        "warm-up takes.",
        means="The learning rate would never come down.",
        remedy="Give more steps, or a shorter warm-up.",
    ),
    folder_kind(
        "A gradient norm of 0",
        *("--max-grad-norm", "0"),
        message="max_grad_norm is 0.0; it takes a finite number above 0.",
        means="Gradients are scaled down to it, and nothing would be trained.",
        remedy="Leave it out to clip nothing.",
    ),
)
