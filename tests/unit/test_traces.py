"""Traces: what is recorded comes back, and whatever is not what was recorded is named."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_traces import recorded, some

import forkpoint
from forkpoint import Rollout, RolloutBatch, TraceError, losses
from forkpoint.rollouts.traces import open_trace, record
from forkpoint.testing import tiny_model

SOURCE = Path(forkpoint.__file__).parents[1]


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
    first, second = forkpoint.rollouts.traces.open_trace(tmp_path / "t")
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
