"""Traces: what is recorded comes back, and whatever is not what was recorded is named."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from made_traces import recorded, rollout_lists, some

import forkpoint
from forkpoint import Rollout, RolloutBatch, RolloutError, TraceError, losses
from forkpoint.rollouts.traces import open_trace, record


@given(rollouts=rollout_lists())
@settings(max_examples=40, deadline=None)
def test_a_batch_comes_back_equal(
    rollouts: list[Rollout], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, batch = tmp_path_factory.mktemp("trace") / "t", RolloutBatch(rollouts)
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


def test_a_batch_without_advantages_stays_without_them(tmp_path: Path) -> None:
    batch = RolloutBatch.from_padded([[1, 2, 3]], [[1] * 3], [[0, 1, 1]])
    with record(tmp_path / "t") as trace:
        trace.add(batch)
        trace.add(some())
    without, given = open_trace(tmp_path / "t")
    assert list(without.batch) == list(batch) and given.batch.has_advantages
    with pytest.raises(RolloutError, match="needs advantages"):
        losses.GRPO().check(without.batch)


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


def test_the_notes_come_back(tmp_path: Path) -> None:
    notes = {"loss": losses.GRPO(clip_high=math.inf), "betas": (0.9, 0.95)}
    with record(tmp_path / "t", notes=notes):
        pass
    found = open_trace(tmp_path / "t").notes
    assert found is not None and found["betas"] == [0.9, 0.95]
    assert found["loss"]["clip_high"] == "Infinity"


def test_a_trace_names_the_version_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed version can be another one."""
    other = SimpleNamespace(version="0.1.0")
    monkeypatch.setattr("importlib.metadata.Distribution.from_name", lambda _: other)
    assert open_trace(recorded(tmp_path / "t")).forkpoint == forkpoint.__version__


def test_a_trace_is_read_while_it_grows(tmp_path: Path) -> None:
    with record(tmp_path) as recorder:
        none = open_trace(tmp_path)
        recorder.add(some())
        assert len(none) == 0 and len(open_trace(tmp_path)) == 1
        first = open_trace(tmp_path).digest(1)
        recorder.add(some(seed=1))
        recorder.add(some(seed=2))
        trace = open_trace(tmp_path)
        assert len(list(trace)) == 3
        assert trace.digest(1) == first != trace.digest(3)


def test_recording_goes_on(tmp_path: Path) -> None:
    whole, parts = recorded(tmp_path / "whole"), tmp_path / "parts"
    for n in range(3):
        with record(parts, notes={"run": 3} if n != 1 else None, resume=True) as trace:
            assert len(trace) == n
            trace.add(some(seed=n), {"scale": 0.5})
    for one, other in zip(open_trace(whole), open_trace(parts), strict=True):
        assert list(one.batch) == list(other.batch) and one.loss_inputs == other.loss_inputs


def test_what_a_killed_recorder_left_is_removed(tmp_path: Path) -> None:
    recorded(tmp_path)
    (tmp_path / ".batch-000003.safetensors.1f.tmp").write_bytes(b"half")
    assert len(list(open_trace(tmp_path))) == 3
    with record(tmp_path, resume=True) as recorder:
        assert recorder.add(some(seed=3)) == 3
    assert not list(tmp_path.glob(".*.tmp"))


# Damage
# ------------------------------------------------------------


def edit(**changes: Any) -> Callable[[Path], None]:
    """Changes the settings."""

    def harm(path: Path) -> None:
        values = json.loads((path / "trace.json").read_text())
        (path / "trace.json").write_text(json.dumps({**values, **changes}))

    return harm


BATCH = "batch-000001.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file missing": (lambda p: (p / BATCH).unlink(), f"batch-000002.* and no {BATCH}"),
    "a file with a hole": (lambda p: os.truncate(p / BATCH, 1 << 40), "batch 1 takes 1"),
    "a file cut short": (lambda p: os.truncate(p / BATCH, 99), "is not a batch of a trace"),
    "notes that are not JSON": (
        lambda p: (p / "trace.json").write_bytes(b"[" * 100_000),
        "trace.json: not JSON",
    ),
    "notes of another type": (edit(notes="two"), "trace.json: notes is 'two'"),
    "another file": (edit(kind="x"), "it does not have the settings of a trace"),
    "an old trace": (edit(schema=1), "is a trace of schema 1, .* record again"),
    "no settings": (lambda p: (p / "trace.json").unlink(), "is not a trace"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(damage: str, tmp_path: Path) -> None:
    path = recorded(tmp_path / "t")
    harm, said = DAMAGE[damage]
    harm(path)
    with pytest.raises(RolloutError, match=said) as caught:
        list(open_trace(path))
    assert str(path) in str(caught.value) and len(str(caught.value)) < 1000


# Files that somebody made
# ------------------------------------------------------------

Parts = tuple[dict[str, np.ndarray], dict[str, Any]]


def change(**changes: Any) -> Callable[[Parts], None]:
    """Changes fields of the first rollout that are no arrays; None removes one."""

    def harm(parts: Parts) -> None:
        first = parts[1]["rollouts"][0]
        first |= changes
        parts[1]["rollouts"][0] = {k: v for k, v in first.items() if v is not None}

    return harm


def put_array(name: str, value: Any) -> Callable[[Parts], None]:
    return lambda parts: parts[0].update({name: np.asarray(value)})


MADE: dict[str, tuple[Callable[[Parts], Any], str]] = {
    "no array of a field": (lambda p: p[0].pop("rollouts.0.loss_mask"), "argument: 'loss_mask'"),
    "a field that is none": (change(reward=1.0), "argument 'reward'"),
    "a value out of range": (change(temperature=-1.0), "temperature is -1.0"),
    "an array of another shape": (put_array("rollouts.0.loss_mask", np.ones((1, 2))), "mask"),
    "an array of nothing": (put_array("x", [1]), "the array 'x' is unknown"),
    "rollouts of the same id": (change(rollout_id="g0-r1"), "'g0-r1'"),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_batch_that_no_recorder_wrote(kind: str, tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", 1)
    arrays = safetensors.numpy.load((path / "batch-000000.safetensors").read_bytes())
    values = json.loads(arrays.pop("json").tobytes())
    harm, said = MADE[kind]
    harm((arrays, values))
    text = np.frombuffer(json.dumps(values).encode(), np.uint8)
    put(path, safetensors.numpy.save({**arrays, "json": text}))
    with pytest.raises(TraceError, match=said) as caught:
        list(open_trace(path))
    assert "batch-000000.safetensors is not a batch of a trace" in str(caught.value)


def put(path: Path, content: bytes) -> None:
    """Makes this the first batch."""
    (path / "batch-000000.safetensors").write_bytes(content)


def test_the_limit_on_memory(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", 2)
    assert len(list(open_trace(path, memory_limit="1MB"))) == 2
    with pytest.raises(RolloutError, match=r"a batch takes .* memory_limit is 19\.5 K"):
        list(open_trace(path, memory_limit="20KB"))
    with pytest.raises(RolloutError, match=r"trace\.json takes .* memory_limit is 100 bytes"):
        open_trace(path, memory_limit=100)
