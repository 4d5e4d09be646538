"""Folders of replays that somebody has changed: refused by name, before anything is put back."""

import copy
import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from replays import checkpoint_of, copy_of, rows, run
from safetensors.torch import load_file, save_file

from forkpoint import ConfigError
from forkpoint.apps.replay.folder import MANIFEST, ROWS, STATE
from forkpoint.testing import tiny_model

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, dict[str, Any]], object]
FILE = "00000.safetensors"


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "begun"
    run(folder, steps=2)
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


def link(path: Path) -> None:
    """Put a link in the place of a file or a folder, to one with the same content."""
    elsewhere = path.parent.parent / f"{path.name}-elsewhere"
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.write_bytes(b"a letter")
    path.symlink_to(elsewhere)


class Acts:
    """A pickle that makes a folder when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("acted",)


def in_torch_format(path: Path) -> None:
    """A checkpoint as torch's own format has it."""
    (path / FILE).unlink()
    (path / ".metadata").write_bytes(pickle.dumps(Acts()))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit": (lambda f: flip(checkpoint_of(f) / FILE), "is damaged: it has SHA-256"),
    "cut": (lambda f: os.truncate(checkpoint_of(f) / FILE, 999), "is damaged: it has SHA-256"),
    "missing": (lambda f: (checkpoint_of(f) / FILE).unlink(), f"{FILE} is missing"),
    "besides": (
        lambda f: save_file({"x": torch.ones(1)}, checkpoint_of(f) / "x.safetensors"),
        "x.safetensors does not belong to the checkpoint",
    ),
    "pickle": (lambda f: in_torch_format(checkpoint_of(f)), f"{FILE} is missing"),
    "no state": (lambda f: (checkpoint_of(f) / STATE).unlink(), f"it has no {STATE}"),
    "state": (lambda f: (checkpoint_of(f) / STATE).write_text("{"), "this is not JSON"),
    "nested": (lambda f: (checkpoint_of(f) / STATE).write_text("[" * 100_000), "this is not JSON"),
    "version": (lambda f: (checkpoint_of(f) / STATE).write_text('{"schema": 7}'), "has schema 7"),
    "step": (
        lambda f: checkpoint_of(f).rename(f / "checkpoint-00000003"),
        "is of step 2, and rows.jsonl has 2 rows",
    ),
    "rows": (lambda f: os.truncate(f / ROWS, 100), "rows.jsonl has 0 rows"),
    "no rows": (lambda f: (f / ROWS).unlink(), "rows.jsonl is missing"),
    "manifest": (lambda f: (f / MANIFEST).write_text("{"), "not JSON"),
    "manifest's version": (lambda f: (f / MANIFEST).write_text('{"schema": 7}'), "schema 7"),
    "link": (lambda f: link(f / ROWS), "is a link"),
    "linked checkpoint": (lambda f: link(checkpoint_of(f)), "is a link"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused(
    name: str, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = copy_of(begun, tmp_path / "damaged")
    damage, said = DAMAGE[name]
    damage(folder)
    assert_refused(folder, said)
    assert not Path("acted").exists()


def assert_refused(folder: Path, said: str) -> None:
    """A replay refuses the folder, and neither files nor weights nor generators change."""
    model = tiny_model("qwen3", dtype=torch.float32)
    weights = copy.deepcopy(model.state_dict())
    before = {p: p.read_bytes() for p in folder.parent.rglob("*") if p.is_file()}

    def noted(*arguments: Any) -> None:
        raise AssertionError("a generator has been put back")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.set_rng_state", noted)
        with pytest.raises(ConfigError, match=said):
            run(folder, model=model, steps=2)
    assert {p: p.read_bytes() for p in folder.parent.rglob("*") if p.is_file()} == before
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def reseal(folder: Path, change: Change) -> None:
    """Change tensors and state of a checkpoint, with a hash that holds."""
    path = checkpoint_of(folder)
    tensors, state = load_file(path / FILE), json.loads((path / STATE).read_text())
    before = dict(tensors)
    change(tensors, state)
    if tensors.keys() != before.keys() or any(t is not before[n] for n, t in tensors.items()):
        save_file(tensors, path / FILE)
    state["files"] = {FILE: hashlib.sha256((path / FILE).read_bytes()).hexdigest()}
    (path / STATE).write_text(json.dumps(state))


WEIGHT = "shared/model/model.embed_tokens.weight"
RESEALED: dict[str, tuple[Change, str]] = {
    "a field besides": (lambda t, s: s.update(more=1), "more is no field of this schema"),
    "a field missing": (lambda t, s: s.pop("plain"), "plain is missing"),
    "a step that is not there": (lambda t, s: s.update(step=9), "is of step 9, and rows.jsonl has"),
    "a shape": (lambda t, s: t.update({WEIGHT: t[WEIGHT][:2].clone()}), "checkpoint of another"),
    "a tensor missing": (lambda t, s: t.pop(WEIGHT), "has the shape nothing"),
    "a tensor besides": (lambda t, s: t.update(x=torch.ones(1)), "is no state of these models"),
    "a parameter that is none": (
        lambda t, s: s["plain"].update({"shared/optimizer/999/step": 1}),
        "is no state of these models",
    ),
    "another side": (
        lambda t, s: s["plain"].update({"third/optimizer/0/step": 1}),
        "is no state of these models",
    ),
    "a generator": (
        lambda t, s: s["generators"].update(cpu="zz"),
        "no states of random number generators",
    ),
    "no generators": (lambda t, s: s.update(generators={}), "no states of random number gen"),
}


@pytest.mark.parametrize("what", RESEALED)
def test_checkpoints_that_no_replay_wrote(what: str, begun: Path, tmp_path: Path) -> None:
    folder = copy_of(begun, tmp_path / "changed")
    change, said = RESEALED[what]
    reseal(folder, change)
    assert_refused(folder, said)


def test_resealing_itself_is_not_refused(begun: Path, tmp_path: Path) -> None:
    folder = copy_of(begun, tmp_path / "changed")
    reseal(folder, lambda tensors, state: None)
    run(folder, steps=2)
    assert rows(folder) == rows(begun)


def lines_changed(path: Path, change: Callable[[list[Any]], object]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.reverse(), "line 1: step is 2; here belongs step 1"),
        (lambda rows: rows[0]["shared"].update(ms=-1), "line 1: shared.ms is -1; it takes"),
        (lambda rows: rows[0].update(dense=None), "line 1: dense or difference .* baseline is"),
        (lambda rows: rows[0]["dense"].pop("loss"), "line 1: dense.loss is missing"),
        (lambda rows: rows[0]["shared"]["event_ms"].pop(), "shared.event_ms has .* entries"),
    ],
)
def test_rows_that_no_replay_wrote(
    begun: Path, tmp_path: Path, change: Callable[[list[Any]], object], said: str
) -> None:
    folder = copy_of(begun, tmp_path / "changed")
    lines_changed(folder / ROWS, change)
    assert_refused(folder, said)
