"""Traces: what is recorded comes back, and whatever is not what was recorded is named."""

import errno
import json
import math
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import forkpoint
from forkpoint import ConfigError, Rollout, RolloutBatch, RolloutError, TraceError, losses
from forkpoint.synthetic import synthetic_rollouts
from forkpoint.testing import tiny_model
from forkpoint.traces import lock, open_rollouts, open_trace, record
from forkpoint.traces.lock import FolderLock

SOURCE = Path(forkpoint.__file__).parents[1]


def some(groups: int = 2, seed: int = 0) -> list[Rollout]:
    return synthetic_rollouts(
        groups=groups, rollouts_per_group=3, prompt_tokens=9, response_tokens=4, seed=seed
    )


def recorded(path: Path, batches: int = 3) -> Path:
    with record(path, loss=losses.GRPO()) as trace:
        for n in range(batches):
            trace.add(some(seed=n), {"scale": 0.5})
    return path


@st.composite
def batches(draw) -> RolloutBatch:
    has_old, has_weights, has_returns = (draw(st.booleans()) for _ in range(3))
    finite = st.floats(allow_nan=False, allow_infinity=False)
    made = []
    for n in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 5))
        per_token = st.lists(finite, min_size=length, max_size=length)
        made.append(
            Rollout(
                draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)),
                [0, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))],
                draw(finite | per_token),
                old_logprobs=[-draw(st.floats(0, 1e300))] * length if has_old else None,
                weights=draw(finite | per_token) if has_weights else None,
                returns=draw(finite | per_token) if has_returns else None,
                old_values=draw(per_token) if has_returns else None,
                temperature=draw(st.floats(1e-3, 1e3)),
                group_id=draw(st.none() | st.text()),
                rollout_id=draw(st.none() | st.just(f"r{n}")),
                extras=draw(st.none() | st.dictionaries(st.text(), finite | st.text())),
            )
        )
    return RolloutBatch(made)


@given(batch=batches())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_batch_comes_back_equal(batch: RolloutBatch, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("trace") / "t"
    with record(path) as trace:
        assert trace.add(batch) == 0
    (back,) = open_trace(path)
    assert list(back.batch) == list(batch)
    assert (back.batch.group_index == batch.group_index).all()


def test_batches_come_in_order_with_what_the_loss_was_given(tmp_path: Path) -> None:
    denominators = losses.Denominators(tokens=12, rollouts=6, groups=2)
    inputs = {
        "denominators": denominators,
        "scale": np.float32(0.25),
        "step": 7,
        "note": "half",
        "unlimited": math.inf,
        "teacher": torch.arange(6, dtype=torch.float32).reshape(3, 2).T,
        "mask": np.array([True, False]),
    }
    with forkpoint.record(tmp_path / "t") as trace:
        trace.add(RolloutBatch(some()), inputs)
        trace.add(some(3, seed=1))
        assert len(trace) == 2
    first, second = forkpoint.traces.open_trace(tmp_path / "t")
    assert (first.index, second.index) == (0, 1)
    assert list(first.batch) == some() and list(second.batch) == some(3, seed=1)
    given = dict(first.loss_inputs)
    assert given.pop("teacher").tolist() == [[0, 2, 4], [1, 3, 5]]
    assert given.pop("mask").tolist() == [True, False]
    assert losses.Denominators(**given.pop("denominators")) == denominators
    assert given == {"scale": 0.25, "step": 7, "note": "half", "unlimited": "Infinity"}
    assert second.loss_inputs == {}


def test_tensors_of_a_loop_are_kept_as_numbers(tmp_path: Path) -> None:
    """With a graph, in 16 bits, as scalars of either kind: what lies about in a training loop."""
    leaf = torch.tensor([0.5, -1.25], requires_grad=True)
    half = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    eighth = half.to(torch.float8_e4m3fn)
    inputs = {"graph": leaf * 2, "half": half, "one": (leaf.sum() * 2).bfloat16(), "8": eighth}
    with record(tmp_path / "t") as trace:
        trace.add(some(), inputs)
    (step,) = open_trace(tmp_path / "t")
    assert step.loss_inputs["graph"].tolist() == [1.0, -2.5]
    assert step.loss_inputs["half"].tolist() == step.loss_inputs["8"].tolist() == [[1.0, 3.0]]
    assert step.loss_inputs["half"].dtype == np.float32
    assert step.loss_inputs["one"] == -1.5


def test_the_manifest_has_the_settings_and_the_counts(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    loss = losses.GRPO(clip=0.3, clip_high=math.inf)
    with record(tmp_path / "t", model=model, loss=loss, optimizer=optimizer) as trace:
        trace.add(some())
    found = open_trace(tmp_path / "t")
    assert found.model_config is not None and found.loss is not None
    assert found.model_config["hidden_size"] == model.config.hidden_size
    assert found.loss["name"] == "GRPO" and found.loss["clip"] == 0.3
    assert found.loss["clip_high"] == "Infinity"
    assert found.optimizer is not None and found.optimizer["name"] == "AdamW"
    assert found.optimizer["groups"][0]["betas"] == [0.9, 0.95]
    (entry,), batch = found.entries, RolloutBatch(some())
    assert entry.bytes == (tmp_path / "t" / entry.file).stat().st_size
    assert (entry.rollouts, entry.tokens, entry.trained_tokens) == (
        *(len(batch), batch.logical_tokens),
        batch.trained_tokens,
    )
    with record(tmp_path / "c", model=model.config, loss={"name": "mine"}, notes={"run": 3}):
        pass
    other = open_trace(tmp_path / "c")
    assert other.model_config == found.model_config
    assert (other.loss, other.optimizer, other.notes) == ({"name": "mine"}, None, {"run": 3})


def test_a_trace_is_read_while_it_grows(tmp_path: Path) -> None:
    with record(tmp_path) as recorder:
        trace = open_trace(tmp_path)
        assert len(trace) == 0 and trace.refresh() == 0
        recorder.add(some())
        assert len(trace) == 0 and trace.refresh() == 1
        first = trace.fingerprint
        recorder.add(some(seed=1))
        recorder.add(some(seed=2))
        assert trace.refresh() == 2 and len(list(trace)) == 3
        assert trace.entries[0].checksum == first != trace.fingerprint
        assert open_trace(tmp_path).fingerprint == trace.fingerprint


def test_recording_goes_on(tmp_path: Path) -> None:
    whole, parts = recorded(tmp_path / "whole"), tmp_path / "parts"
    for n in range(3):
        with record(parts, loss=losses.GRPO() if n != 1 else None, resume=True) as trace:
            assert len(trace) == n
            trace.add(some(seed=n), {"scale": 0.5})
    for one, other in zip(open_trace(whole), open_trace(parts), strict=True):
        assert list(one.batch) == list(other.batch) and one.loss_inputs == other.loss_inputs


@pytest.mark.parametrize("cut", [1, 5, 200, 10_000])
def test_a_line_cut_short_loses_that_batch_alone(tmp_path: Path, cut: int) -> None:
    recorded(tmp_path)
    manifest = tmp_path / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    left = lines[-1][: max(1, len(lines[-1]) - cut)]
    manifest.write_bytes(b"".join(lines[:-1]) + left)
    (tmp_path / ".batch-000003.safetensors.tmp").write_bytes(b"half")
    trace = open_trace(tmp_path)
    assert trace.unfinished and len(list(trace)) == 2
    with record(tmp_path, resume=True) as recorder:
        recorder.add(some(seed=2), {"scale": 0.5})
    assert manifest.read_bytes().splitlines(keepends=True) == lines, "not written as before"
    assert not open_trace(tmp_path).unfinished
    assert not list(tmp_path.glob(".*"))


def test_a_header_cut_short_is_no_trace_and_can_be_begun_again(tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").write_bytes(b'{"kind":"forkp')
    with pytest.raises(TraceError, match="no whole line"):
        open_trace(tmp_path)
    with pytest.raises(TraceError, match="not empty"):
        record(tmp_path)
    with record(tmp_path, resume=True) as trace:
        trace.add(some())
    assert len(open_trace(tmp_path)) == 1


# What is not what was recorded -------------------------------------------------------------------


def edit_line(path: Path, number: int, edit) -> None:
    manifest = path / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines()
    lines[number] = edit(lines[number])
    manifest.write_bytes(b"\n".join(lines) + b"\n")


def swap_lines(path: Path) -> None:
    manifest = path / "manifest.jsonl"
    a, b, c, d = manifest.read_bytes().splitlines()
    manifest.write_bytes(b"\n".join([a, c, b, d]) + b"\n")


def drop_line(path: Path) -> None:
    manifest = path / "manifest.jsonl"
    a, _, c, d = manifest.read_bytes().splitlines()
    manifest.write_bytes(b"\n".join([a, c, d]) + b"\n")


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


def foreign_shard(path: Path) -> None:
    recorded(path.parent / "other")
    shutil.copy(path.parent / "other" / "batch-000001.safetensors", path)


def foreign_lines(path: Path) -> None:
    recorded(path.parent / "other")
    ours = (path / "manifest.jsonl").read_bytes().splitlines()
    theirs = (path.parent / "other" / "manifest.jsonl").read_bytes().splitlines()
    (path / "manifest.jsonl").write_bytes(b"\n".join(ours[:2] + theirs[2:]) + b"\n")


def newer(line: bytes) -> bytes:
    return json.dumps({**json.loads(line), "schema": 2, "forkpoint": "9.9"}).encode()


DAMAGE = {
    "a shard's header flipped": (lambda p: flip(p / "batch-000001.safetensors", 0.01), "SHA-256"),
    "a shard's data flipped": (lambda p: flip(p / "batch-000001.safetensors", 0.9), "000001"),
    "a shard missing": (lambda p: (p / "batch-000001.safetensors").unlink(), "is missing"),
    "a shard emptied": (lambda p: (p / "batch-000001.safetensors").write_bytes(b""), "0 bytes"),
    "a shard of another trace": (
        lambda p: foreign_shard(p / "batch-000001.safetensors"),
        "not what was recorded",
    ),
    "shards swapped": (
        lambda p: shutil.copy(p / "batch-000000.safetensors", p / "batch-000001.safetensors"),
        "not what was recorded",
    ),
    "a count changed": (
        lambda p: edit_line(p, 2, lambda line: line.replace(b'"tokens":', b'"tokens":1')),
        "line 3 has been changed",
    ),
    "the header changed": (
        lambda p: edit_line(p, 0, lambda line: line.replace(b"GRPO", b"GSPO")),
        "line 1 has been changed",
    ),
    "lines swapped": (swap_lines, "line 2 does not follow"),
    "a line missing": (drop_line, "line 2 does not follow"),
    "lines of another trace": (foreign_lines, "line 3 does not follow"),
    "a line is not JSON": (lambda p: edit_line(p, 1, lambda _: b"{"), "line 2: not JSON"),
    "a line is not of a manifest": (lambda p: edit_line(p, 1, lambda _: b"[1]"), "line 2 is [1]"),
    "a newer schema": (lambda p: edit_line(p, 0, newer), "schema 2"),
    "no manifest": (lambda p: (p / "manifest.jsonl").unlink(), "is no trace"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(damage: str, tmp_path: Path) -> None:
    path = recorded(tmp_path / "t")
    harm, said = DAMAGE[damage]
    harm(path)
    with pytest.raises(TraceError) as caught:
        open_trace(path).verify()
    assert said in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("lost", [2, 3, 4])
def test_lines_that_are_missing_at_the_end(lost: int, tmp_path: Path) -> None:
    """Nothing in the lines that are left says so; the files of the other batches do."""
    path = recorded(tmp_path / "t", batches=4)
    lines = (path / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    (path / "manifest.jsonl").write_bytes(b"".join(lines[:-lost]))
    said = f"lists {4 - lost} batches, and batch-000003.safetensors is there: lines are missing"
    with pytest.raises(TraceError, match=said):
        open_trace(path)
    with pytest.raises(TraceError, match=said):
        record(path, resume=True)


def test_a_file_without_its_line_is_a_batch_that_was_not_finished(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", batches=3)
    lines = (path / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    (path / "manifest.jsonl").write_bytes(b"".join(lines[:-1]))
    trace = open_trace(path)
    assert len(list(trace)) == 2
    with record(path, resume=True) as recorder:
        recorder.add(some(seed=7))
        recorder.add(some(seed=8))
    assert trace.refresh() == 2 and list(trace[2].batch) == some(seed=7)


def test_a_manifest_replaced_while_it_is_read(tmp_path: Path) -> None:
    trace = open_trace(recorded(tmp_path / "t"))
    shutil.copy(recorded(tmp_path / "o") / "manifest.jsonl", tmp_path / "t" / "manifest.jsonl")
    with pytest.raises(TraceError, match="no longer the one that was opened"):
        trace.refresh()


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


@dataclass
class Odd:
    x: object


def test_a_batch_that_cannot_be_kept_leaves_the_trace_as_it_was(tmp_path: Path) -> None:
    with record(tmp_path) as trace:
        trace.add(some())
        before = sorted(p.name for p in tmp_path.iterdir())
        for inputs, said in (
            ({"x": object()}, "the loss input 'x'"),
            ({"x": Odd(object())}, "the loss input 'x'"),
            ({"x": np.array(["a"])}, "array of <U1"),
            ({3: 1}, "is named 3"),
            ({"x": torch.eye(2).to_sparse()}, r"'x' is a tensor on cpu of the layout torch.sparse"),
            ({"x": torch.ones(2, device="meta")}, "'x' is a tensor on meta"),
            ([0.5], r"loss_inputs is \[0.5\] of type list; it takes a mapping"),
            ([], r"loss_inputs is \[\] of type list"),
        ):
            with pytest.raises(ConfigError, match=said):
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


class Filling:
    """A file on a disk that has room for so many bytes more."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, content: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(content[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("room", [0, 1, 100])
def test_a_disk_that_is_full_for_a_while(room: int, tmp_path: Path) -> None:
    """Half a line of the manifest is taken back, and the loop can go on with another batch."""
    with record(tmp_path) as trace:
        trace.add(some())
        file = trace._file
        trace._file = Filling(file, room)  # type: ignore
        with pytest.raises(OSError, match="No space left"):
            trace.add(some(seed=1))
        assert len(trace) == 1 == len(list(open_trace(tmp_path)))
        trace._file = file
        assert trace.add(some(seed=2)) == 1
    read = open_trace(tmp_path)
    assert [list(step.batch) for step in read] == [some(), some(seed=2)] and not read.unfinished


# One recorder at a time --------------------------------------------------------------------------


def test_a_second_recorder_is_refused(tmp_path: Path) -> None:
    """Also one that resumes, and leaves what the first is writing; readers are never kept out."""
    path = tmp_path / "t"
    with record(path) as first:
        first.add(some())
        (path / ".batch-000001.safetensors.tmp").write_bytes(b"half of what it is adding")
        before = {entry.name: entry.read_bytes() for entry in path.iterdir()}
        for resume in (False, True):
            with pytest.raises(TraceError, match=rf"{path} is .* by process {os.getpid()} on .*; "):
                record(path, resume=resume)
        assert {entry.name: entry.read_bytes() for entry in path.iterdir()} == before
        reader = open_trace(path)
        first.add(some(seed=1))
        assert reader.refresh() == 1 and len(list(reader)) == 2
        assert open_rollouts(path).read()
    assert not (path / ".lock").exists()
    with record(path, resume=True) as again:
        first.close()  # which has nothing to let go any more
        with pytest.raises(TraceError, match="is being recorded into"):
            record(path, resume=True)
        again.add(some(seed=2))
    assert len(open_trace(path)) == 3


def test_what_is_refused_leaves_no_lock(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    for _ in range(2):
        with pytest.raises(TraceError, match=r"holds 'mine\.txt'"):
            record(tmp_path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_recorder_that_is_killed_leaves_no_lock(end: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "t"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None and writer.stdout.readline()
    with pytest.raises(TraceError, match=f"by process {writer.pid} on {socket.gethostname()}; "):
        record(path, resume=True)
    assert len(open_trace(path)) >= 1, "a reader is not kept out"
    writer.send_signal(end)
    writer.wait()
    writer.stdout.close()
    assert (path / ".lock").exists()
    with record(path, resume=True) as trace:
        assert len(trace) >= 1
    assert not (path / ".lock").exists()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_let_go(tmp_path: Path) -> None:
    """Such as a loader of data, which has all that its parent had open."""
    held = FolderLock(tmp_path)
    assert held.take() is None
    child = multiprocessing.get_context("fork").Process(target=held.release)
    child.start()
    child.join()
    assert child.exitcode == 0 and FolderLock(tmp_path).take() is not None
    held.release()
    other = FolderLock(tmp_path)
    assert other.take() is None
    other.release()


def test_a_lock_that_was_taken_away_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One holder lets go, and another begins, between opening the file and locking it."""
    first, second, third = (FolderLock(tmp_path) for _ in range(3))
    assert first.take() is None
    real = lock._lock

    def between(handle: int) -> None:
        monkeypatch.setattr(lock, "_lock", real)
        first.release()
        assert third.take() is None
        real(handle)  # of the file that is gone

    monkeypatch.setattr(lock, "_lock", between)
    assert second.take() == f"process {os.getpid()} on {socket.gethostname()}"
    third.release()
    assert second.take() is None
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Recording goes on, and says that nothing keeps a second recorder out."""

    def without(handle: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "_lock", without)
    monkeypatch.setattr(lock, "_unlock", without)
    recorded(tmp_path / "t")
    assert "cannot be locked (No locks available)" in caplog.text
    assert len(open_trace(tmp_path / "t")) == 3


# Killed ------------------------------------------------------------------------------------------

WRITER = """
import sys, forkpoint
from forkpoint.synthetic import synthetic_rollouts
rollouts = synthetic_rollouts(groups=2, rollouts_per_group=3, prompt_tokens=400, response_tokens=50)
with forkpoint.record(sys.argv[1], resume=True) as trace:
    while True:
        n = trace.add(rollouts, {"step": len(trace)})
        print(n, flush=True)
"""


def test_a_killed_recorder_loses_at_most_the_unfinished_batch(tmp_path: Path) -> None:
    """Twelve kills at random moments, each going on where the one before was killed."""
    random, path, told = np.random.default_rng(0), tmp_path / "t", -1
    for _ in range(12):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        wanted = told + int(random.integers(1, 20))
        while (line := writer.stdout.readline()) and int(line) < wanted:
            told = int(line)
        told = int(line)
        try:  # not right after a line, where nothing is being written
            writer.wait(timeout=float(random.uniform(0, 0.02)))
        except subprocess.TimeoutExpired:
            writer.kill()
        told = max([told, *map(int, writer.stdout.read().split())])
        writer.wait()
        writer.stdout.close()
        trace = open_trace(path)
        # What was told is there; the batch after it may have been whole when the kill came.
        assert told + 1 <= len(trace) <= told + 2
        assert [step.loss_inputs["step"] for step in trace] == list(range(len(trace)))
        told = len(trace) - 1
    assert told > 20
