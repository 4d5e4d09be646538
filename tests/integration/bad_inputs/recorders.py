"""Traces that two recorders wrote, or would write, and lines of a manifest that are none."""

import json
import os
from pathlib import Path
from typing import Any

from bad_inputs.traces import BATCH, held, recorded, trace_kind
from forkpoint.rollouts.traces import manifest, open_trace, record
from forkpoint.rollouts.traces.lock import LOCK


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("trace/manifest.jsonl").read_text().splitlines()]


def write(sealed: list[dict[str, Any]]) -> None:
    content = b"".join(map(manifest.encode, sealed))
    Path("trace/manifest.jsonl").write_bytes(content)


def sealed_again(**changes: Any) -> None:
    """The first batch's line says something else, and all checksums hold; None takes a field."""
    recorded()
    found, previous = [], ""
    for number, line in enumerate(lines()):
        values = {k: v for k, v in line.items() if k not in ("previous", "checksum")}
        if number == 1:
            values = {k: v for k, v in {**values, **changes}.items() if v is not None}
        found.append(manifest.sealed(values, previous))
        previous = found[-1]["checksum"]
    write(found)


def written_twice() -> None:
    """The last line again, as a second recorder leaves it."""
    recorded()
    found = lines()
    write([*found, found[-1]])


def forked() -> None:
    """A recorder that belongs to another process."""
    with record("trace") as recorder:
        recorder._lock._owner = 4711
        try:
            recorder.add(BATCH)
        finally:
            recorder._lock._owner = os.getpid()


def without_its_lock() -> None:
    with record("trace") as recorder:
        recorder.add(BATCH)
        Path("trace", LOCK).unlink()
        held("trace")
        recorder.add(BATCH)


RECORDERS = (
    trace_kind(
        "A batch added by a forked process",
        forked,
        message="the recorder of trace belongs to process 4711, and this one was forked from it; a "
        "trace has one recorder at a time. Add batches in the process that called record, or "
        "record into a folder of its own.",
        means="Parent and child would write batches of the same numbers.",
        remedy="Send the batch to the parent, or call record in the child, with another folder.",
    ),
    trace_kind(
        "A recorder whose lock was removed",
        without_its_lock,
        message="the lock of trace was removed, and process 4711 on node3 has taken it since; a "
        "trace has one recorder at a time. Go on with that one; this one adds nothing more.",
        means="The file .lock keeps a second recorder out; it is not to be removed by hand.",
        remedy="End one of the two. Until somebody has taken it, a lock that was removed is taken "
        "again.",
    ),
    trace_kind(
        "A trace to go on with whose last lines do not follow",
        lambda: record("trace", resume=True),
        prepare=written_twice,
        message="trace/manifest.jsonl, line 4 does not follow the line before it: lines are "
        "missing, out of order, or of another trace. Take a copy of the trace as it was recorded. "
        "The batches before it can be read (open_trace), and none can be added. Record into a new "
        "folder.",
        means="Two recorders wrote it. open_trace reads up to that line, and says so.",
        remedy="Record into a new folder.",
    ),
    trace_kind(
        "A line of a manifest that lacks a field",
        lambda: open_trace("trace"),
        prepare=lambda: sealed_again(bytes=None),
        message="trace/manifest.jsonl, line 2: there is no bytes. Take a copy of the trace as it "
        "was recorded.",
        means="Its checksums hold, so that it was written like this, and not by a recorder.",
        remedy="Take the trace as it was recorded.",
    ),
    trace_kind(
        "A field of a manifest of another type",
        lambda: open_trace("trace"),
        prepare=lambda: sealed_again(rollouts="two"),
        message="trace/manifest.jsonl, line 2: rollouts is 'two'; it takes a whole number from 1. "
        "Take a copy of the trace as it was recorded.",
        means="Its checksums hold, so that it was written like this, and not by a recorder.",
        remedy="Take the trace as it was recorded.",
    ),
)
