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
from forkpoint.apps.replay.reading import read_manifest, read_plans, read_steps
from forkpoint.apps.replay.schema import MANIFEST, PLANS, ROWS, STATE
from forkpoint.testing import tiny_model

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, dict[str, Any]], object]
FILE = "shard-00001-model-00001-of-00001.safetensors"


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
    "rows": (lambda f: os.truncate(f / ROWS, 100), "has fewer than the"),
    "no rows": (lambda f: (f / ROWS).unlink(), "has fewer than the"),
    "manifest": (lambda f: (f / MANIFEST).write_text("{"), "not JSON"),
    "manifest's version": (lambda f: (f / MANIFEST).write_text('{"schema": 7}'), "schema 7"),
    "earlier": (lambda f: (f / "checkpoint.safetensors").touch(), "of an earlier forkpoint"),
    "link": (lambda f: link(f / ROWS), "is a link or no regular file"),
    "linked lock": (lambda f: ((f / ".lock").unlink(), link(f / ".lock")), "is a link or no"),
    "linked checkpoint": (lambda f: link(checkpoint_of(f)), "is a link or no folder"),
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
    """Change tensors and state of a checkpoint, with hashes and lengths that hold."""
    path = checkpoint_of(folder)
    tensors, state = load_file(path / FILE), json.loads((path / STATE).read_text())
    for name in (ROWS, PLANS):
        state["bytes"][name] = (folder / name).stat().st_size
    before = dict(tensors)
    change(tensors, state)
    if tensors.keys() != before.keys() or any(t is not before[n] for n, t in tensors.items()):
        save_file(tensors, path / FILE)  # without the metadata of shards, which may be left out
    state["files"] = {FILE: hashlib.sha256((path / FILE).read_bytes()).hexdigest()}
    (path / STATE).write_text(json.dumps(state))


MOMENT = "shared/optimizer/0/exp_avg"
WEIGHT = "shared/model/model.embed_tokens.weight"
RESEALED: dict[str, tuple[Change, str]] = {
    "a field besides": (lambda t, s: s.update(more=1), "more is no field of this schema"),
    "a field missing": (lambda t, s: s.pop("plain"), "plain is missing"),
    "a step that is not there": (lambda t, s: s.update(step=9), "is of step 9, and rows.jsonl has"),
    "bytes within a line": (lambda t, s: s["bytes"].update({ROWS: 1}), "line 1 goes beyond byte 1"),
    "a shape": (lambda t, s: t.update({WEIGHT: t[WEIGHT][:2].clone()}), "checkpoint of another"),
    "a dtype": (lambda t, s: t.update({WEIGHT: t[WEIGHT].half()}), "torch.float16"),
    "a tensor missing": (lambda t, s: t.pop(WEIGHT), "is nothing, and here"),
    "a tensor besides": (lambda t, s: t.update(x=torch.ones(1)), "and here it is nothing"),
    "a state's shape": (
        lambda t, s: s["states"][MOMENT].update(shape=[2]),
        r"exp_avg' is .*, and here it is \(\(2,\)",
    ),
    "a state larger than its parameter": (
        lambda t, s: s["states"][MOMENT].update(shape=[10**12]),
        "larger than its parameter",
    ),
    "a state's device": (
        lambda t, s: s["states"][MOMENT].update(device="cuda:7"),
        "exp_avg' on 'cuda:7'",
    ),
    "a parameter that is none": (
        lambda t, s: s["plain"].update({"shared/optimizer/999/step": 1}),
        "is no state of these models",
    ),
    "another side": (
        lambda t, s: s["plain"].update({"third/optimizer/0/step": 1}),
        "is no state of these models",
    ),
    "torch's generator": (
        lambda t, s: s["generators"][0]["torch"].update(cpu="zz"),
        "no states of random number generators",
    ),
    "Python's generator": (
        lambda t, s: s["generators"][0]["python"][1].pop(),
        "no states of random number generators",
    ),
    "numpy's generator": (
        lambda t, s: s["generators"][0]["numpy"].update(bit_generator="x"),
        "no states of random number generators",
    ),
    "no generators": (lambda t, s: s.update(generators=[]), "generators is empty"),
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
    ("name", "change", "said"),
    [
        (ROWS, lambda rows: rows.reverse(), "line 1: step is 2; here belongs step 1"),
        (ROWS, lambda rows: rows[1].update(step=7), "line 2: step is 7; here belongs step 2"),
        (ROWS, lambda rows: rows[0]["shared"].update(ms=-1), "line 1: shared.ms is -1; it takes"),
        (ROWS, lambda rows: rows[0]["shared"].update(ms=0), "line 1: shared.ms is 0; it takes"),
        (ROWS, lambda rows: rows[0].update(dense=None), "line 1: dense is missing; .* baseline is"),
        (ROWS, lambda rows: rows[0]["dense"].pop("loss"), "line 1: dense.loss is missing"),
        (ROWS, lambda rows: rows[0]["shared"]["event_ms"].pop(), "shared.event_ms has .* entries"),
    ],
)
def test_rows_that_no_replay_wrote(
    begun: Path, tmp_path: Path, name: str, change: Callable[[list[Any]], object], said: str
) -> None:
    folder = copy_of(begun, tmp_path / "changed")
    lines_changed(folder / name, change)
    reseal(folder, lambda tensors, state: None)
    assert_refused(folder, said)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (ROWS, lambda rows: rows[0].update(fingerprint="0" * 16), "has no plan of the batch 0{16}"),
        (
            ROWS,
            lambda rows: rows[0]["shared"]["events"].reverse(),
            "plans.shared is not the plan that step 1 ran",
        ),
        (PLANS, lambda plans: plans.append(plans[0]), "has been in a line before"),
        (PLANS, lambda plans: plans[0]["rollout_ids"].pop(), "line 1: rollout_ids has 5 entries"),
        (
            PLANS,
            lambda plans: plans[0]["plans"].pop("dense"),
            "plans.dense is not the plan that step 1 ran",
        ),
        (
            PLANS,
            lambda plans: plans[0]["plans"]["shared"]["shape"].update(layers=10**9),
            "plans.shared.shape: the model's layers is 1000000000; it takes",
        ),
    ],
)
def test_plans_that_are_not_those_of_the_rows(
    begun: Path, tmp_path: Path, name: str, change: Callable[[list[Any]], object], said: str
) -> None:
    folder = copy_of(begun, tmp_path / "changed")
    lines_changed(folder / name, change)
    with pytest.raises(ConfigError, match=said):
        list(read_plans(folder, read_steps(folder, read_manifest(folder))))
