"""Recorders: what they refuse, a full disk, and one at a time."""

import errno
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_traces import recorded, some

from forkpoint import ConfigError, Rollout, RolloutError, TraceError, losses
from forkpoint.rollouts.synthetic import synthetic_rollouts
from forkpoint.rollouts.traces import open_trace, record


def test_what_the_recorder_refuses(tmp_path: Path) -> None:
    recorded(tmp_path / "t")
    with pytest.raises(TraceError, match="is not empty"):
        record(tmp_path / "t")
    with pytest.raises(TraceError, match=r"loss {'clip': 0.2}, and now it is {'clip': 0.3}"):
        record(tmp_path / "t", loss=losses.GRPO(clip=0.3), resume=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(TraceError, match="is a file"):
        record(tmp_path / "file")
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "mine.txt").write_text("x")
    with pytest.raises(TraceError, match=r"holds 'mine.txt'"):
        record(tmp_path / "o", resume=True)
    with pytest.raises(ConfigError, match="loss is <function"):
        record(tmp_path / "l", loss=lambda outputs, batch: 0)
    with pytest.raises(ConfigError, match=r"model is 'ok.json' of type str"):
        record(tmp_path / "m", model="ok.json")
    with pytest.raises(ConfigError, match=r"notes is .*object"):
        record(tmp_path / "n", notes={"x": object()})


def test_a_batch_that_cannot_be_kept_leaves_the_trace_as_it_was(tmp_path: Path) -> None:
    with record(tmp_path) as trace:
        trace.add(some())
        before = sorted(p.name for p in tmp_path.iterdir())
        refused: tuple[tuple[Any, str], ...] = (
            ({"x": object()}, "the loss input 'x'"),
            ({"x": np.array(["a"])}, "array of <U1"),
            ({3: 1}, "is named 3"),
            ({"x": torch.eye(2).to_sparse()}, "'x' is a Tensor of torch.float32, torch.sparse"),
            ([], r"loss_inputs is \[\] of type list"),
        )
        for inputs, said in refused:
            with pytest.raises((ConfigError, RolloutError), match=said):
                trace.add(some(), inputs)
        with pytest.raises(RolloutError, match="extras"):
            trace.add([Rollout([1, 2], [0, 1], 1.0, extras={"x": (1, 2)})])
        with pytest.raises(RolloutError, match="no rollouts"):
            trace.add([])
        assert sorted(p.name for p in tmp_path.iterdir()) == before and len(trace) == 1
        trace.add(some())
    assert len(list(open_trace(tmp_path))) == 2
    with pytest.raises(TraceError, match="is closed"):
        trace.add(some())


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("room", "error"), [(0, FULL), (100, KeyboardInterrupt("stopped"))], ids=["full", "interrupted"]
)
def test_an_error_while_the_manifest_is_written(
    room: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a line of the manifest is taken back, and the loop can go on with another batch."""
    with record(tmp_path) as trace:
        trace.add(some())
        manifest = tmp_path / "manifest.jsonl"
        size, synced = manifest.stat().st_size, os.fsync

        def failing(handle: int) -> None:
            if os.path.samestat(os.fstat(handle), manifest.stat()):
                os.truncate(manifest, size + room)
                raise error
            synced(handle)

        with monkeypatch.context() as patch, pytest.raises(type(error), match=str(error)[-8:]):
            patch.setattr(os, "fsync", failing)
            trace.add(some(seed=1))
        assert len(trace) == 1 == len(list(open_trace(tmp_path)))
        assert trace.add(some(seed=2)) == 1
    read = open_trace(tmp_path)
    assert [list(step.batch) for step in read] == [some(), some(seed=2)]


def test_an_interrupt_after_the_line_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder and the trace count the same batches."""
    interrupts = [KeyboardInterrupt()]

    def interrupted(trace: object, name: str, value: object) -> None:
        object.__setattr__(trace, name, value)
        if name == "_batches" and interrupts:
            raise interrupts.pop()

    with record(tmp_path) as trace:
        trace.add(some())
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(type(trace), "__setattr__", interrupted)
            trace.add(some(seed=1))
        assert len(trace) == 1 == len(open_trace(tmp_path))
        assert trace.add(some(seed=2)) == 1
    assert len(open_trace(tmp_path)) == 2


# One recorder at a time
# ------------------------------------------------------------


def test_a_second_recorder_is_refused(tmp_path: Path) -> None:
    """Also one that resumes; readers are not."""
    path = tmp_path / "t"
    with record(path) as first:
        first.add(some())
        (path / ".batch-000001.safetensors.tmp").write_bytes(b"half of what it is adding")
        before = {entry.name: entry.read_bytes() for entry in path.iterdir()}
        for resume in (False, True):
            with pytest.raises(TraceError, match=f"another recorder writes into {path}"):
                record(path, resume=resume)
        assert {entry.name: entry.read_bytes() for entry in path.iterdir()} == before
        first.add(some(seed=1))
        assert len(list(open_trace(path))) == 2
    with record(path, resume=True) as again:
        first.close()  # the lock of another recorder stays
        with pytest.raises(TraceError, match="another recorder"):
            record(path, resume=True)
        again.add(some(seed=2))
    assert len(open_trace(path)) == 3


def forked(call: Any) -> str:
    """The result or the error of a call in a process that was forked from this one."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def answered() -> None:
        try:
            sender.send(str(call()))
        except Exception as error:
            sender.send(f"{type(error).__name__}: {error}")

    child = context.Process(target=answered)
    child.start()
    child.join()
    assert receiver.poll(), "the process was killed"
    return receiver.recv()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_process_cannot_add(tmp_path: Path) -> None:
    """The recorder of its parent still holds the folder, and its trace stays complete."""
    path = tmp_path / "t"
    with record(path) as trace:
        trace.add(some(seed=1))
        before = {entry.name: entry.read_bytes() for entry in path.iterdir()}
        said = forked(lambda: trace.add(some(seed=5)))
        assert said.startswith(f"TraceError: the recorder of {path} belongs to {os.getpid()}"[:40])
        assert "was forked from it" in said
        assert forked(trace.close) == "None" and forked(trace.__len__) == "1"
        with pytest.raises(TraceError, match="another recorder"):
            record(path, resume=True)
        assert {entry.name: entry.read_bytes() for entry in path.iterdir()} == before
        trace.add(some(seed=2))
    assert [list(step.batch) for step in open_trace(path)] == [some(seed=1), some(seed=2)]


def test_a_trace_that_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with record(path) as trace:
        trace.add(some())
        path.rename(tmp_path / "other")
        with pytest.raises(TraceError, match=r"manifest\.jsonl was removed"):
            trace.add(some(seed=1))
        assert len(trace) == 1


def test_a_manifest_that_something_else_has_written(tmp_path: Path) -> None:
    """Such as a recorder on a machine that does not see the lock."""
    manifest = recorded(tmp_path / "t", 1) / "manifest.jsonl"
    with record(tmp_path / "t", resume=True) as trace:
        content = manifest.read_bytes()
        manifest.write_bytes(content + content.splitlines(keepends=True)[1])
        with pytest.raises(TraceError, match="something else has written it"):
            trace.add(some(seed=1))


def test_two_threads_add_one_after_another(tmp_path: Path) -> None:
    with record(tmp_path) as trace:
        threads = [
            threading.Thread(target=lambda n=n: [trace.add(some(seed=n)) for _ in range(5)])
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(list(open_trace(tmp_path))) == 15


# Killed ------------------------------------------------------------------------------------------


def add_on(path: Path, writing: int) -> None:
    """Records until it is killed, and tells the number of each batch."""
    made = synthetic_rollouts(groups=2, rollouts_per_group=3, prompt_tokens=400, response_tokens=50)
    with os.fdopen(writing, "w") as told, record(path, resume=True) as trace:
        while True:
            n = trace.add(made, {"step": len(trace)})
            print(n, file=told, flush=True)


def test_a_killed_recorder_loses_at_most_the_unfinished_batch(tmp_path: Path) -> None:
    """Six kills at random moments, each going on where the one before was killed."""
    random, path, told = np.random.default_rng(0), tmp_path / "t", -1
    for _ in range(6):
        reading, writing = os.pipe()
        writer = multiprocessing.get_context("fork").Process(target=add_on, args=(path, writing))
        writer.start()
        os.close(writing)
        with os.fdopen(reading) as lines:
            wanted = told + int(random.integers(1, 20))
            while (line := lines.readline()) and int(line) < wanted:
                told = int(line)
            told = int(line)
            # Not right after a line, where nothing is being written.
            writer.join(float(random.uniform(0, 0.02)))
            writer.kill()
            told = max([told, *map(int, lines.read().split())])
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        trace = open_trace(path)
        # What was told is there; the batch after it may have been whole when the kill came.
        assert told + 1 <= len(trace) <= told + 2
        assert [step.loss_inputs["step"] for step in trace] == list(range(len(trace)))
        told = len(trace) - 1
    assert told > 10
