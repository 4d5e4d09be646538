"""Folders of replays that somebody has changed: refused by name, and nothing is half put back."""

import copy
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from replays import copy_of, rows, run
from safetensors import safe_open
from safetensors.torch import save_file

from forkpoint import ConfigError
from forkpoint.apps.replay.schema import CHECKPOINT, MANIFEST, PLANS, ROWS
from forkpoint.testing import tiny_model

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, dict[str, Any]], object]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "begun"
    run(folder, steps=2)
    return folder


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (CHECKPOINT, lambda path: flip(path, -5), "is damaged"),
        (CHECKPOINT, lambda path: path.write_bytes(path.read_bytes()[:-9]), "no whole checkpoint"),
        (CHECKPOINT, lambda path: save_file({"x": torch.ones(1)}, path), "schema None"),
        (ROWS, lambda path: flip(path, 40), "not as the checkpoint left it"),
        (ROWS, lambda path: path.unlink(), "not as the checkpoint left it"),
        (MANIFEST, lambda path: path.write_text("{"), "not JSON"),
        (MANIFEST, lambda path: path.write_text('{"schema": 7}'), "schema 7"),
        (ROWS, lambda path: link(path), "is a link or no regular file"),
        (CHECKPOINT, lambda path: link(path), "is a link or no regular file"),
        (PLANS, lambda path: (path.unlink(), path.mkdir()), "is a link or no regular file"),
        (".lock", lambda path: link(path), "is a link or no regular file"),
    ],
    ids=[
        *("bit", "cut", "foreign", "row", "no-rows", "manifest", "version"),
        *("rows-link", "checkpoint-link", "folder", "lock-link"),
    ],
)
def test_damage_is_refused(
    begun: Path, tmp_path: Path, name: str, damage: Callable[[Path], None], said: str
) -> None:
    folder = copy_of(begun, tmp_path / "damaged")
    damage(folder / name)
    assert_refused(folder, said)


def link(path: Path) -> None:
    """Put a link in the place of a file, to one with the same content."""
    elsewhere = path.parent.parent / path.name
    elsewhere.write_bytes(path.read_bytes() if path.exists() else b"a letter")
    path.unlink(missing_ok=True)
    path.symlink_to(elsewhere)


def assert_refused(folder: Path, said: str, **changes: Any) -> None:
    """A replay refuses the folder, and neither files nor the state of this process change."""
    model = tiny_model("qwen3", dtype=torch.float32)
    weights = copy.deepcopy(model.state_dict())
    before = {p: p.read_bytes() for p in folder.parent.rglob("*") if p.is_file()}

    def noted(*arguments: Any) -> None:
        raise AssertionError("a generator has been put back")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("torch.set_rng_state", "random.setstate", "numpy.random.set_state"):
            patch.setattr(name, noted)
        with pytest.raises(ConfigError, match=said):
            run(folder, model=model, **{"steps": 2, **changes})
    assert {p: p.read_bytes() for p in folder.parent.rglob("*") if p.is_file()} == before
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def resealed(folder: Path, change: Change) -> None:
    """Change tensors and facts of a checkpoint, and make its checksums those of the files."""
    path = folder / CHECKPOINT
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        facts = json.loads(file.metadata()["forkpoint"])
    for name in (ROWS, PLANS):
        content = (folder / name).read_bytes()
        facts["bytes"][name], facts["crc"][name] = len(content), zlib.crc32(content)
    change(tensors, facts)
    facts["crc32"] = {name: crc(tensor) for name, tensor in tensors.items()}
    named = [name for name in tensors if not name.startswith("random/")]
    facts["devices"] = {name: facts["devices"].get(name, "cpu") for name in named}
    path.unlink()
    save_file(tensors, path, metadata={"forkpoint": json.dumps(facts)})


def crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


STATE = "shared/optimizer/0/exp_avg"
EVERY = "shared/model/model.embed_tokens.weight"
STEP = "shared/optimizer/0/step"
RESEALED: dict[str, tuple[Change, str]] = {
    "nothing": (lambda t, f: f.update(more=1), "its metadata: more is no field of this schema"),
    "a missing fact": (lambda t, f: f.pop("plain"), "its metadata: plain is missing"),
    "a step that is not there": (lambda t, f: f.update(step=9), "is of step 9, and rows.jsonl has"),
    "bytes within a line": (
        lambda t, f: (f["bytes"].update({ROWS: 1}), f["crc"].update({ROWS: zlib.crc32(b"{")})),
        "rows.jsonl, line 1 goes beyond byte 1",
    ),
    "more bytes than there are": (
        lambda t, f: f["bytes"].update({ROWS: 2**31}),
        "is not as the checkpoint left it",
    ),
    "a shape": (lambda t, f: t.update({EVERY: t[EVERY][:2].clone()}), r"with shape \(2, 32\)"),
    "a dtype": (lambda t, f: t.update({EVERY: t[EVERY].half()}), "is torch.float16, and here"),
    "a state's shape": (lambda t, f: t.update({STATE: t[STATE][:2].clone()}), r"is of shape \(2,"),
    "a state's dtype": (lambda t, f: t.update({STATE: t[STATE].double()}), "is torch.float64, and"),
    "a state's name": (
        lambda t, f: t.update({f"{STATE}x": t.pop(STATE)}),
        "AdamW keeps step, exp_",
    ),
    "a state besides": (
        lambda t, f: t.update({"shared/optimizer/0/more": torch.ones(1)}),
        "AdamW keeps step, exp_avg, exp_avg_sq",
    ),
    "a parameter that is none": (
        lambda t, f: t.update({"shared/optimizer/999/step": torch.ones(())}),
        "the optimizer has .* parameters",
    ),
    "another side": (
        lambda t, f: t.update({"third/optimizer/0/step": torch.ones(())}),
        "which is no state of shared or dense",
    ),
    "a step of 0": (
        lambda t, f: t.update({STEP: torch.zeros(())}),
        r"step is 0\.0; it takes a number from 1 to 2",
    ),
    "a step that is no number": (
        lambda t, f: t.update({STEP: torch.tensor(float("nan"))}),
        "step is nan; it takes",
    ),
    "a plain step": (
        lambda t, f: (
            t.pop(STEP),
            f["plain"].update({STEP: 2}),
        ),
        "is of shape None",
    ),
    "a device": (
        lambda t, f: f["devices"].update({STATE: "cuda:7"}),
        "devices.* is 'cuda:7'; it takes cpu",
    ),
    "torch's generator": (
        lambda t, f: t.update({"random/cpu": torch.full_like(t["random/cpu"], 7)}),
        "random/cpu is no state of a random number generator",
    ),
    "the length of torch's generator": (
        lambda t, f: t.update({"random/cpu": t["random/cpu"][:9].clone()}),
        "random/cpu with shape",
    ),
    "Python's generator": (
        lambda t, f: f["python_random"][1].pop(),
        "has 624 entries; it takes 625",
    ),
    "the place in it": (
        lambda t, f: f["python_random"][1].__setitem__(624, 625),
        "it takes a whole number from 0 to 624",
    ),
    "numpy's generator": (
        lambda t, f: f["numpy_random"].__setitem__(0, "PCG64"),
        "it takes 'MT19937'",
    ),
    "numpy's numbers": (
        lambda t, f: f["numpy_random"][1].__setitem__(3, -1),
        r"numpy_random\[1\]\[3\] is -1; it takes",
    ),
}


@pytest.mark.parametrize("what", RESEALED)
def test_resealed_checkpoints_are_refused(what: str, begun: Path, tmp_path: Path) -> None:
    folder = copy_of(begun, tmp_path / "resealed")
    change, said = RESEALED[what]
    resealed(folder, change)
    assert_refused(folder, said)


def test_resealing_itself_is_not_refused(begun: Path, tmp_path: Path) -> None:
    folder = copy_of(begun, tmp_path / "resealed")
    resealed(folder, lambda tensors, facts: None)
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
        (ROWS, lambda rows: rows[0].update(fingerprint="0" * 16), "has no plan of the batch 0{16}"),
        (
            ROWS,
            lambda rows: rows[1]["shared"].update(microbatches=9),
            "shared.microbatches of step 2 is 9, and",
        ),
        (
            ROWS,
            lambda rows: rows[0]["shared"]["events"].reverse(),
            "shared.events of step 1 are not those of plans.shared",
        ),
        (ROWS, lambda rows: rows[0]["shared"]["event_ms"].pop(), "shared.event_ms has .* entries"),
        (PLANS, lambda plans: plans.append(plans[0]), "has been in a line before"),
        (PLANS, lambda plans: plans[0]["rollout_ids"].pop(), "line 1: rollout_ids has 5 entries"),
        (PLANS, lambda plans: plans[0]["plans"].pop("dense"), "are not there both"),
        (
            PLANS,
            lambda plans: plans[0]["plans"]["shared"]["microbatches"][0].update(children=[0]),
            r"plans.shared: microbatches\[0\].children are not the microbatches",
        ),
        (
            PLANS,
            lambda plans: plans[0]["plans"]["shared"]["shape"].update(layers=10**9),
            "plans.shared.shape.layers is 1000000000; it takes",
        ),
    ],
)
def test_resealed_rows_and_plans_are_refused(
    begun: Path, tmp_path: Path, name: str, change: Callable[[list[Any]], object], said: str
) -> None:
    folder = copy_of(begun, tmp_path / "resealed")
    lines_changed(folder / name, change)
    resealed(folder, lambda tensors, facts: None)
    assert_refused(folder, said)
