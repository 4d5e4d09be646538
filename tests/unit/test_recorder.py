"""Recorders: what they refuse, a full disk, threads and kills."""

import errno
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_traces import recorded, some

from forkpoint import ConfigError, Rollout, RolloutError, TraceError, save_rollouts
from forkpoint.rollouts.synthetic import synthetic_rollouts
from forkpoint.rollouts.traces import open_rollouts, open_trace, record


def test_what_the_recorder_refuses(tmp_path: Path) -> None:
    recorded(tmp_path / "t")
    with pytest.raises(TraceError, match="is not empty"):
        record(tmp_path / "t")
    with pytest.raises(TraceError, match=r"the notes {'run': 3}, and now they are {'run': 4}"):
        record(tmp_path / "t", notes={"run": 4}, resume=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(TraceError, match="is a file"):
        record(tmp_path / "file")
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "mine.txt").write_text("x")
    with pytest.raises(TraceError, match=r"holds 'mine.txt'"):
        record(tmp_path / "o", resume=True)
    with pytest.raises(ConfigError, match=r"notes is 'ok.json' of type str"):
        record(tmp_path / "m", notes="ok.json")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"notes is .*object"):
        record(tmp_path / "n", notes={"x": object()})
    with pytest.raises(ConfigError, match=r"notes is .*: the key 1 is of type int"):
        record(tmp_path / "n", notes={1: "a", "1": "b"})  # type: ignore[dict-item]


@pytest.mark.parametrize("path", [None, b"t"])
def test_what_is_no_path(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = rf"path is {path!r} of type {type(path).__name__}; it takes the path of a "
    calls = (record, open_trace, open_rollouts, lambda path: save_rollouts(path, some()))
    for call, of in zip(calls, ("folder,", "trace's folder", "file", "file"), strict=True):
        with pytest.raises(ConfigError, match=said + of):
            call(path)
    assert not list(tmp_path.iterdir())


@dataclass
class Odd:
    a: Any


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_a_batch_that_cannot_be_kept_leaves_the_trace_as_it_was(tmp_path: Path) -> None:
    with record(tmp_path) as trace:
        trace.add(some())
        before = sorted(p.name for p in tmp_path.iterdir())
        refused: tuple[tuple[Any, str], ...] = (
            ({"x": object()}, "the loss input 'x'"),
            ({"x": np.array(["a"])}, "array of <U1"),
            ({"x": np.ones(2, np.longdouble)}, f"array of {np.dtype(np.longdouble)}"),
            ({3: 1}, "is named 3"),
            ({"x": {1: "a", "1": "b"}}, "'x' is .*: the key 1 is of type int"),
            ({"x": Odd(a=[{None: 0}])}, "'x' is .*: the key None is of type NoneType"),
            ({"x": nested(100_000)}, "'x' is .*: maximum recursion depth"),
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


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt("stopped")], ids=["full", "interrupted"])
def test_an_error_while_a_batch_is_written(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace has the batches that it had, and the loop can go on with another one."""
    with record(tmp_path) as trace:
        trace.add(some())

        def failing(handle: int) -> None:
            raise error

        with monkeypatch.context() as patch, pytest.raises(type(error), match=str(error)[-8:]):
            patch.setattr(os, "fsync", failing)
            trace.add(some(seed=1))
        assert len(trace) == 1 == len(list(open_trace(tmp_path)))
        assert trace.add(some(seed=2)) == 1
    read = open_trace(tmp_path)
    assert [list(step.batch) for step in read] == [some(), some(seed=2)]


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
