"""Traces whose last lines do not follow are read up to there; traces that were sealed again with
other values are refused, naming line and field."""

import hashlib
import json
import multiprocessing
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from made_traces import recorded, some

from forkpoint import RolloutError, TraceError, load_rollouts
from forkpoint.rollouts.traces import Recorder, manifest, open_rollouts, open_trace, record, shard

LINES = "manifest.jsonl"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / LINES).read_text().splitlines()]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    (path / LINES).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def heedless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorders that do not look whether they are alone, as before they did."""
    monkeypatch.setattr(Recorder, "_check_process", lambda self: None)
    monkeypatch.setattr(Recorder, "_check_alone", lambda self: None)


def added_by_a_fork(trace: Recorder, count: int) -> None:
    def add() -> None:
        for n in range(count):
            trace.add(some(seed=50 + n))

    child = multiprocessing.get_context("fork").Process(target=add)
    child.start()
    child.join()
    assert child.exitcode == 0


def check_read_up_to(path: Path, batches: int, line: int, left: int, caplog: Any) -> None:
    """The trace has its first batches, and says from which line on others are left out."""
    caplog.clear()
    trace = open_trace(path)
    assert [list(step.batch) for step in trace] == [some(seed=n) for n in range(batches)]
    assert trace.broken is not None
    assert re.match(rf"{path / LINES}, line {line}\b", trace.broken)
    word = "line" if left == 1 else "lines"
    assert f"and {left} {word} from it on left out" in trace.broken
    assert f"The {batches} batch" in trace.broken and "Two recorders may" in trace.broken
    assert trace.broken in caplog.text and not trace.unfinished
    last = (path / LINES).read_bytes().split(b"\n")[batches]
    assert trace.fingerprint == json.loads(last)["checksum"]
    assert trace.refresh() == 0 and len(trace) == batches
    with pytest.raises(TraceError) as caught:
        trace.verify()
    assert str(caught.value) == trace.broken
    reader = open_rollouts(path)
    assert len(reader.read()) == 6 * batches and reader.notes == (trace.broken,)
    with pytest.raises(TraceError, match=r"none can be added\. Record into a new folder"):
        record(path, resume=True)
    assert not (path / ".lock").exists()


@pytest.mark.usefixtures("heedless")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("by_parent", [1, 2])
@pytest.mark.parametrize("by_child", [1, 3])
def test_a_fork_that_added(by_child: int, by_parent: int, tmp_path: Path, caplog: Any) -> None:
    """The lines of the child follow, but the parent has replaced the files of their batches."""
    with record(tmp_path) as trace:
        for n in range(3):
            trace.add(some(seed=n))
        added_by_a_fork(trace, by_child)
        for n in range(by_parent):
            trace.add(some(seed=70 + n))
    check_read_up_to(tmp_path, 3, 5 + by_child, by_parent, caplog)
    replaced = open_trace(tmp_path).broken
    assert replaced is not None
    word = "batch" if by_child == 1 else "batches"
    assert f"The files of {by_child} {word} before it were replaced" in replaced


@pytest.mark.usefixtures("heedless")
def test_two_recorders(tmp_path: Path, caplog: Any) -> None:
    """Of which the second began once the lock had been removed by hand."""
    with record(tmp_path) as first:
        first.add(some())
        (tmp_path / ".lock").unlink()
        with record(tmp_path, resume=True) as second:
            second.add(some(seed=50))
            first.add(some(seed=60))
    check_read_up_to(tmp_path, 1, 4, 1, caplog)


@pytest.mark.usefixtures("heedless")
def test_two_recorders_that_wrote_over_each_other(tmp_path: Path, caplog: Any) -> None:
    """A resumed one writes where it was, and half a line of the other is left behind its own."""
    recorded(tmp_path, 1)
    with record(tmp_path, resume=True) as first:
        (tmp_path / ".lock").unlink()
        with record(tmp_path, resume=True) as second:
            second.add(some(seed=50), {"note": "x" * 300})
            second.add(some(seed=51))
        first.add(some(seed=1), {"scale": 0.5})
    trace = open_trace(tmp_path)
    assert [list(step.batch) for step in trace] == [some(), some(seed=1)]
    assert trace.broken is not None and "line 4: not JSON" in trace.broken


TAILS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str, int]] = {
    "a line missing": (lambda lines: [*lines[:3], lines[4]], "line 4 does not follow", 2),
    "lines swapped": (lambda ls: [*ls[:3], ls[4], ls[3]], "line 4 does not follow", 2),
    "a line twice": (lambda lines: [*lines[:4], lines[3], lines[4]], "line 5 does not follow", 3),
    "zeros": (lambda lines: [*lines[:3], bytes(500)], "line 4: not JSON", 2),
    "the last line changed": (lambda ls: [*ls[:4], ls[4].replace(b'"tokens":', b'"tokens":1')],
                              "line 5 has been changed", 3),
    "lines of something else": (lambda ls: [*ls[:4], b"[1]", b"{}"], "line 5 is [1], not a", 3),
    "a lone return": (lambda ls: [*ls[:4], b"\r"], "line 5: not JSON", 3),
    "a newer schema at the end": (lambda ls: [*ls[:4], b'{"schema":2,"checksum":""}'],
                                  "line 5: the trace has schema 2", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", TAILS)
def test_tails_that_do_not_follow(name: str, tmp_path: Path, caplog: Any) -> None:
    recorded(tmp_path, 4)
    edit, said, batches = TAILS[name]
    lines = edit((tmp_path / LINES).read_bytes().splitlines())
    (tmp_path / LINES).write_bytes(b"\n".join(lines) + b"\n")
    trace = open_trace(tmp_path)
    assert len(list(trace)) == batches and trace.broken is not None and said in trace.broken
    check_read_up_to(tmp_path, batches, batches + 2, len(lines) - batches - 1, caplog)


def test_a_changed_line_that_others_follow_is_refused(tmp_path: Path) -> None:
    """There is more behind it that was recorded."""
    recorded(tmp_path, 4)
    lines = (tmp_path / LINES).read_bytes().splitlines()
    lines[2] = lines[2].replace(b'"tokens":', b'"tokens":1')
    (tmp_path / LINES).write_bytes(b"\n".join(lines) + b"\n")
    for call in (open_trace, load_rollouts, lambda path: record(path, resume=True)):
        with pytest.raises(TraceError, match="line 3 has been changed since it was recorded"):
            call(tmp_path)


def test_nothing_before_what_does_not_follow_is_no_trace(tmp_path: Path) -> None:
    recorded(tmp_path, 2)
    header, _, last = (tmp_path / LINES).read_bytes().splitlines()
    (tmp_path / LINES).write_bytes(header + b"\n" + last + b"\n")
    with pytest.raises(TraceError, match="line 2 does not follow the line before it"):
        open_trace(tmp_path)


# Sealed again -------------------------------------------------------------------------------------


def reseal(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write lines with checksums that hold, by a way of our own to compute them."""
    previous = ""
    for line in lines:
        line.pop("checksum", None)
        line["previous"] = previous
        text = json.dumps(line, sort_keys=True, separators=(",", ":"))
        line["checksum"] = previous = hashlib.sha256(text.encode()).hexdigest()
    write_lines(path, lines)


def test_sealing_again_changes_nothing(tmp_path: Path) -> None:
    recorded(tmp_path, 2)
    before = (tmp_path / LINES).read_bytes()
    reseal(tmp_path, lines_of(tmp_path))
    assert [json.loads(line) for line in before.splitlines()] == lines_of(tmp_path)
    open_trace(tmp_path).verify()


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**200, 0.5, 1e300, "", "a", "0" * 64, "f" * 32),
    *([], [1], [[]], {}, {"a": 1}, {"name": "GRPO"}, {"name": 3}, {"groups": 1}, "../x", "\ud800"),
    *([None] * 3, ["a"] * 6, [{}] * 6, "é" * 100, 7, 30, 1.0, [0.0], {"": {"": []}}),
)
HEADER, BATCH = 0, 1
NEEDED = {
    HEADER: ("kind", "schema", "forkpoint", "model_config", "loss", "optimizer", "notes", "trace"),
    BATCH: ("batch", "file", "bytes", "sha256", "rollouts", "tokens", "trained_tokens",
            "loss_inputs"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("number", "name"), [(n, name) for n, names in NEEDED.items() for name in names]
)
def test_every_field_is_needed_and_has_a_type(number: int, name: str, tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", 2)
    original = lines_of(path)
    lines = json.loads(json.dumps(original))
    del lines[number][name]
    reseal(path, lines)
    with pytest.raises(TraceError) as caught:
        open_trace(path)
    said = str(caught.value)
    assert f"{path / LINES}, line {number + 1}" in said
    assert f"there is no {name}" in said or name in ("kind", "schema")
    harmless = 0
    for value in VALUES:
        lines = json.loads(json.dumps(original))
        lines[number][name] = value
        reseal(path, lines)
        try:
            open_trace(path).verify()
        except TraceError as error:
            shards = name in ("trace", "bytes", "sha256", "rollouts", "tokens", "trained_tokens")
            assert f"{path / LINES}, line {number + 1}" in str(error) or shards
            assert name in str(error) or shards or name in ("batch", "file", "kind")
            assert len(str(error)) < 700
        else:
            harmless += 1
            assert isinstance(value, type(original[number][name]) | dict | None)
    assert harmless < 8


@pytest.mark.parametrize("number", [HEADER, BATCH])
def test_a_field_that_no_recorder_writes(number: int, tmp_path: Path) -> None:
    lines = lines_of(recorded(tmp_path, 2))
    lines[number]["more"] = 1
    reseal(tmp_path, lines)
    with pytest.raises(TraceError, match=f"line {number + 1}: there is 'more', which no recorder"):
        open_trace(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a":NaN}', "NaN is no number of JSON"),
        ('{"a":1,"a":1}', "the key 'a' is there twice"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "not JSON"),
        ("\xff", "not JSON"),
        ('"x"', "is 'x', not a line of a manifest"),
        ('{"checksum":1}', "not a line of a manifest"),
        ('{"checksum":"\\ud800"}', "has been changed"),
    ],
)
def test_headers_that_are_none(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / LINES).write_bytes(text.encode("latin-1") + b"\n")
    with pytest.raises(TraceError, match="line 1") as caught:
        open_trace(tmp_path)
    assert said in str(caught.value)


def with_shard(path: Path, arrays: dict[str, Any], about: Any) -> None:
    """Put another content into the file of batch 0, and seal that."""
    text = about if isinstance(about, str) else json.dumps(about)
    content = safetensors.numpy.save(arrays, {"forkpoint": text})
    (path / manifest.shard_name(0)).write_bytes(content)
    lines = lines_of(path)
    lines[1] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    reseal(path, lines)


def parts_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    content = (path / manifest.shard_name(0)).read_bytes()
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]["forkpoint"]
    return safetensors.numpy.load(content), json.loads(metadata)


ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "of fewer entries": lambda a: a[:-1].copy(),
    "of none": lambda a: a[:0].copy(),
    "of more": lambda a: np.append(a, a[-1:]),
    "of floats of 32 bits": lambda a: a.astype(np.float32),
    "of bytes": lambda a: a.astype(np.uint8),
    "of two rows": lambda a: np.stack([a, a]),
    "of one number": lambda a: np.zeros((), a.dtype),
    "turned round": lambda a: a[::-1].copy(),
    "of NaN": lambda a: np.full_like(a, np.nan) if a.dtype.kind == "f" else ~a,
    "of large numbers": lambda a: np.full_like(a, 2**31 - 1 if a.dtype.kind != "b" else True),
    "of numbers below 0": lambda a: a - 1 if a.dtype.kind != "b" else ~a,
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_of_a_batch(kind: str, tmp_path: Path) -> None:
    """Sealed again: what is read has the counts of the manifest, and is refused else."""
    path = recorded(tmp_path / "t", 1)
    arrays, about = parts_of(path)
    for name in arrays:
        with_shard(path, {**arrays, name: ARRAYS[kind](arrays[name])}, about)
        check_refused_or_whole(path)
        with_shard(path, {key: a for key, a in arrays.items() if key != name}, about)
        with pytest.raises(TraceError, match=r"is no batch of a trace: there (is|are) no"):
            open_trace(path).verify()


def test_an_array_that_no_recorder_writes(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", 1)
    arrays, about = parts_of(path)
    with_shard(path, {**arrays, "more": np.ones(2)}, about)
    with pytest.raises(TraceError, match="there is 'more', which no recorder writes"):
        open_trace(path).verify()
    with_shard(path, {**arrays, "loss_inputs.more": np.ones((2, 3), np.float16)}, about)
    assert open_trace(path)[0].loss_inputs["more"].shape == (2, 3)


@pytest.mark.parametrize("name", ["trace", "batch", "rollout_ids", "group_ids", "extras", "more"])
def test_the_metadata_of_a_batch(name: str, tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", 1)
    arrays, about = parts_of(path)
    for value in VALUES:
        with_shard(path, arrays, {**about, name: value})
        check_refused_or_whole(path)
    if name != "more":
        with_shard(path, arrays, {key: v for key, v in about.items() if key != name})
        with pytest.raises(TraceError, match=f"there is no {name}"):
            open_trace(path).verify()


@pytest.mark.parametrize(
    "about", ["", "x", "[]", "{}", "[" * 100_000, '{"extras":NaN}', '{"a":1,"a":2}', "\ud800"]
)
def test_metadata_that_is_none(about: str, tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", 1)
    content = json.dumps({"__metadata__": {"forkpoint": about}}).encode()
    content = len(content).to_bytes(8, "little") + content
    (path / manifest.shard_name(0)).write_bytes(content)
    lines = lines_of(path)
    lines[1] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    lines[1] |= {"rollouts": 1, "tokens": 1, "trained_tokens": 0}
    reseal(path, lines)
    with pytest.raises(TraceError, match="is no batch of a trace"):
        open_trace(path).verify()


def check_refused_or_whole(path: Path) -> None:
    try:
        trace = open_trace(path)
        for step in trace:
            entry = trace.entries[step.index]
            found = (len(step.batch), step.batch.logical_tokens, step.batch.trained_tokens)
            assert found == (entry.rollouts, entry.tokens, entry.trained_tokens)
    except TraceError as error:
        assert str(path) in str(error) and len(str(error)) < 1000


@pytest.mark.parametrize("seed", range(4))
def test_values_at_random(seed: int, tmp_path: Path) -> None:
    """A value anywhere in the manifest, or in the metadata of a batch, is another one."""
    source = random.Random(seed)
    path = recorded(tmp_path / "t", 2)
    original, (arrays, about) = lines_of(path), parts_of(path)
    for _ in range(60):
        lines = json.loads(json.dumps(original))
        if source.random() < 0.3:
            write_lines(path, lines)
            with_shard(path, arrays, replaced(about, source))
        else:
            number = source.randrange(len(lines))
            lines[number] = replaced(lines[number], source)
            if not isinstance(lines[number], dict):
                continue
            reseal(path, lines)
        check_refused_or_whole(path)
        reset = path / manifest.shard_name(0)
        reset.write_bytes(safetensors.numpy.save(arrays, {"forkpoint": json.dumps(about)}))


def replaced(tree: Any, source: random.Random) -> Any:
    """The same tree with one value, or one key, replaced."""
    if isinstance(tree, dict) and tree and source.random() < 0.9:
        name = source.choice(list(tree))
        if source.random() < 0.1:
            return {key: value for key, value in tree.items() if key != name}
        return {**tree, name: replaced(tree[name], source)}
    if isinstance(tree, list) and tree and source.random() < 0.7:
        at = source.randrange(len(tree))
        return [*tree[:at], replaced(tree[at], source), *tree[at + 1 :]]
    return source.choice(VALUES)


# Memory -------------------------------------------------------------------------------------------


def test_a_manifest_of_one_endless_line(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", 1)
    with (path / LINES).open("ab") as file:
        file.write(b"x" * 300_000)
    assert open_trace(path).unfinished
    with pytest.raises(RolloutError, match="a line of the manifest needs"):
        open_trace(path, memory_limit=200_000)


def test_a_shard_that_declares_more_than_there_is(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", 1)
    lines = lines_of(path)
    for changes, said in (
        ({"bytes": 2**50}, f"bytes, and the manifest says {2**50}"),
        ({"tokens": 2**45}, f"line 2: tokens is {2**45}; a file of"),
        ({"rollouts": 2**40}, "line 2: tokens is 78; it takes at least one for each"),
    ):
        changed = json.loads(json.dumps(lines))
        changed[1] |= changes
        reseal(path, changed)
        with pytest.raises(TraceError, match=said):
            open_trace(path).verify()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs files with holes")
def test_a_shard_with_a_hole(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", 1)
    os.truncate(path / manifest.shard_name(0), 1 << 40)
    with pytest.raises(TraceError, match=f"it has {1 << 40} bytes"):
        open_trace(path).verify()


def test_the_limit_is_an_argument(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", 2)
    assert len(list(open_trace(path, memory_limit="1MB"))) == 2
    with pytest.raises(RolloutError, match=r"memory_limit is 23\.4 KiB"):
        open_trace(path, memory_limit="24KB").verify()
    with pytest.raises(RolloutError, match=r"memory_limit is 1\.0 KiB, as given"):
        open_trace(path, memory_limit=1024)
    assert shard.bytes_of(100, 2, 50) > 100
