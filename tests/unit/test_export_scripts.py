"""Scripts that write pickled objects of trainers as JSON lines, run on objects like these."""

import json
import pickle
import runpy
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dumps
from dumps import same, tensors, truth
from forkpoint import load_rollouts
from forkpoint.rollouts.synthetic import normalised
from forkpoint.rollouts.traces import open_rollouts

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "export"


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a script on a file, and gives its rollouts."""

    def run(name: str, path: Path) -> list[Any]:
        written = tmp_path / "out.jsonl"
        monkeypatch.setattr(sys, "argv", [name, str(path), str(written)])
        runpy.run_path(str(SCRIPTS / f"{name}.py"))
        assert len((SCRIPTS / f"{name}.py").read_text().splitlines()) <= 30
        assert open_rollouts(written).container == "JSON lines"
        return load_rollouts(written, format="forkpoint")

    return run


def as_written(found: list[Any], wanted: list[Any]) -> None:
    """Advantages are written per token, and zero where nothing is trained."""
    same(found, wanted, "advantage")
    for one, other in zip(found, wanted, strict=True):
        assert (one.advantage[other.loss_mask] == other.advantage).all()


def test_verl(export: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A class like verl's stands in for it."""
    table = tensors(dumps.verl(truth()))
    own = {name: x for name, x in table.items() if isinstance(x, torch.Tensor)}
    other, settings = {"uid": np.array(table["uid"], object)}, {"temperature": 0.7}
    path = tmp_path / "batch.pkl"
    kept = SimpleNamespace(batch=own, non_tensor_batch=other, meta_info=settings)
    path.write_bytes(pickle.dumps(kept))
    stub = SimpleNamespace(load_from_disk=lambda file: pickle.loads(Path(file).read_bytes()))
    monkeypatch.setitem(sys.modules, "verl", SimpleNamespace(DataProto=stub))
    found = export("verl_lines", path)
    as_written(found, truth())
    assert {r.temperature for r in found} == {0.7}


def test_openrlhf(export: Any, tmp_path: Path) -> None:
    tables = [tensors(dumps.openrlhf(part)) for part in (truth()[:4], truth()[4:])]
    experiences = [SimpleNamespace(**table) for table in tables]
    torch.save(experiences, tmp_path / "list.pt")
    as_written(export("openrlhf_lines", tmp_path / "list.pt"), truth())
    torch.save(experiences[0], tmp_path / "one.pt")
    assert len(export("openrlhf_lines", tmp_path / "one.pt")) == 4


def test_slime(export: Any, tmp_path: Path) -> None:
    """With numbers of numpy, which the reader itself refuses."""
    saved = dumps.slime_samples(truth())
    for sample in saved["samples"]:
        sample["reward"] = np.float64(sample["reward"])
    torch.save(saved, tmp_path / "x.pt")
    found = export("slime_lines", tmp_path / "x.pt")
    same(found, truth(), "advantage", "reference_logprobs")
    for group in range(3):
        own = [n for n, r in enumerate(truth()) if r.group_id == f"g{group}"]
        wanted = normalised(np.array([truth()[n].advantage for n in own]))
        np.testing.assert_allclose([found[n].advantage for n in own], wanted, rtol=1e-12)


def test_prime_rl(export: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a message that prime-rl wrote, kept as JSON. Stand-ins of prime-rl and msgspec decode it:
    the fields of its class, by place."""
    path = ROOT / "tests" / "fixtures" / "prime-rl-rank_0.json"
    monkeypatch.setitem(sys.modules, "msgspec", SimpleNamespace(msgpack=Messages))
    types = SimpleNamespace(MicroBatch=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "prime_rl.transports.rollouts.types", types)
    for name in ("prime_rl", "prime_rl.transports", "prime_rl.transports.rollouts"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    by_tokens = partial(sorted, key=lambda rollout: rollout.token_ids.tolist())
    found = by_tokens(export("prime_rl_lines", path))
    as_written(found, by_tokens(truth()))
    assert {r.temperature for r in found} == {1.0}


class Messages:
    """msgspec.msgpack for messages that are JSON here: lists of the fields by place."""

    FIELDS = (
        *("input_ids", "loss_mask", "advantages", "inference_logprobs", "position_ids"),
        *("sequence_lengths", "temperatures", "env_names", "seq_lens", "ref_logprobs"),
    )

    @classmethod
    def decode(cls, content: bytes, type: Any) -> list[Any]:
        del type
        rest = dict.fromkeys(("mm_kwargs", "rl_weights"))
        return [
            SimpleNamespace(**dict(zip(cls.FIELDS, values, strict=False)), **rest)
            for values in json.loads(content)
        ]
