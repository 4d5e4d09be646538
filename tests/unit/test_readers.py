"""Reading what trainers write: every format, out of every kind of file, gives the same rollouts."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import dumps
from dumps import TABLES, prompt_of, rows_of, same, tensors, truth, write_json, write_torch
from forkpoint import ConfigError, RolloutBatch, RolloutError, load_rollouts, record
from forkpoint.rollouts.traces import FORMATS, open_rollouts

RAGGED = ("forkpoint", "slime")
CONTAINERS = ("torch", "parquet", "json", "rows", "safetensors")
# Each format in two kinds of files, and each kind of file with four formats.
CASES = [
    (name, CONTAINERS[(n + turn) % (4 if name in RAGGED else 5)])
    for n, name in enumerate(TABLES)
    for turn in (0, 2)
]


@pytest.mark.parametrize(("name", "container"), CASES)
def test_formats_in_containers(name: str, container: str, tmp_path: Path) -> None:
    wanted = truth()
    table = TABLES[name](wanted)
    path = dumps.write(tmp_path / ("x.zst" if container == "rows" else "x"), container, table)
    found = open_rollouts(path)
    rollouts = found.read()
    same(rollouts, wanted)
    assert found.format == name.partition(",")[0]
    assert found.container == ("JSON lines" if container in ("json", "rows") else container)
    assert not found.skipped.count
    assert load_rollouts(path, format=found.format) == rollouts


def test_verl_takes_what_there_is(tmp_path: Path) -> None:
    """Rollout log-probs for want of old ones, rewards for want of advantages, weights; in parts as
    DataProto has them, with columns that no field is read from."""
    table = tensors(dumps.verl(truth())) | {"timings": [0.5, 0.25], "bins": torch.ones(3, 2)}
    table["rollout_log_probs"] = table.pop("old_log_probs")
    table["rollout_is_weights"] = torch.full_like(table["rollout_log_probs"], 0.5)
    scores = torch.zeros_like(table.pop("advantages"))
    rewards = torch.arange(len(scores), dtype=torch.float32)
    scores[:, 0] = rewards
    table["token_level_scores"] = scores
    parts = {"non_tensor_batch": {"uid": table.pop("uid")}, "meta_info": {"temperature": 0.5}}
    file = open_rollouts(write_torch(tmp_path / "x.pt", {"batch": table, **parts}))
    found = file.read()
    same(found, truth(), "advantage")
    assert {(r.weights, r.temperature) for r in found} == {(0.5, 0.5)}
    for members in RolloutBatch(truth()).groups():
        own = rewards[members].double().numpy()
        expected = (own - own.mean()) / own.std()
        np.testing.assert_allclose([found[n].advantage for n in members], expected)
        assert [found[n].extras for n in members] == [{"reward": r} for r in own.tolist()]
    assert any("advantages are the rewards" in note for note in file.notes)


@pytest.mark.parametrize("mask", ["loss_mask", "none"])
def test_verl_before_there_was_a_response_mask(mask: str, tmp_path: Path) -> None:
    table = dumps.verl(truth())
    response = table.pop("response_mask")
    wanted = truth()
    if mask == "loss_mask":
        table["loss_mask"] = np.concatenate([np.zeros_like(table["prompts"]), response], axis=1)
    else:
        wanted = [
            replace(r, loss_mask=np.arange(len(r)) >= prompt_of(r), old_logprobs=None)
            for r in wanted
        ]
    found = load_rollouts(write_torch(tmp_path / "x.pt", tensors(table)))
    for one, other in zip(found, wanted, strict=True):
        assert one.loss_mask.tolist() == other.loss_mask.tolist()


def test_verl_text_needs_a_tokenizer(tmp_path: Path) -> None:
    lines = [
        {"input": "ab" * (1 + n % 2), "output": "cd", "score": float(n), "step": 3}
        for n in range(4)
    ]
    path = write_json(tmp_path / "3.jsonl", lines)
    with pytest.raises(RolloutError, match=r"3.jsonl, line 1: the record holds text.*tokenizer"):
        load_rollouts(path)
    file = open_rollouts(path, tokenizer=lambda text: np.frombuffer(text.encode(), np.uint8))
    found = file.read()
    assert file.format == "verl-text" and "losses are not exact" in file.notes[0]
    assert [r.token_ids.tolist() for r in found[:2]] == [list(b"abcd"), list(b"ababcd")]
    assert found[0].loss_mask.tolist() == [0, 0, 1, 1]
    assert [r.advantage for r in found] == [-1, -1, 1, 1]


def test_no_column_is_named_that_a_format_lacks(tmp_path: Path) -> None:
    table = tensors(dumps.trl(truth()))
    del table["advantages"]
    with pytest.raises(RolloutError, match=r"row 0: there is no advantages\. Add it"):
        load_rollouts(write_torch(tmp_path / "x.pt", table))


def test_a_tokenizer_without_text_is_refused(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "x.pt", tensors(dumps.trl(truth())))
    with pytest.raises(ConfigError, match=r"x.pt is of format 'trl', which has token ids, and a"):
        load_rollouts(path, on_error="skip", tokenizer=lambda text: [1])
    with record(tmp_path / "t") as trace:
        trace.add(truth())
    with pytest.raises(ConfigError, match=r"t is of format 'trace', which has token ids, and a"):
        open_rollouts(tmp_path / "t", tokenizer=lambda text: [1])


def test_a_tokenizer_by_its_file(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    path = write_json(
        tmp_path / "1.jsonl", [{"input": "b a", "output": "b", "score": 1, "step": 1}]
    )
    (found,) = load_rollouts(path, tokenizer=tmp_path / "tokenizer.json")
    assert found.token_ids.tolist() == [1, 0, 1]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer .*tokenizer.json cannot be read"):
        load_rollouts(path, tokenizer=tmp_path / "tokenizer.json")


def test_tensors_of_other_classes_are_read(tmp_path: Path) -> None:
    """Parameters, as a training loop may hold, and jagged ids, as verl's engine holds."""
    table = tensors(dumps.verl(truth()))
    wanted = load_rollouts(write_torch(tmp_path / "wanted.pt", table))
    table["advantages"] = torch.nn.Parameter(table["advantages"])
    assert load_rollouts(write_torch(tmp_path / "x.pt", table)) == wanted
    table["prompts"] = torch.nested.as_nested_tensor(list(table["prompts"]), layout=torch.jagged)
    path = write_torch(tmp_path / "x.pt", table)
    if torch.__version__ >= (2, 15):  # torch.load(weights_only=True) takes none any more
        with pytest.raises(RolloutError, match=r"_rebuild_njt.* as lists and tensors"):
            load_rollouts(path)
    else:
        assert load_rollouts(path) == wanted


def test_a_trace_is_read_as_one_list(tmp_path: Path) -> None:
    with record(tmp_path / "t") as trace:
        trace.add(truth())
        trace.add(truth(seed=1))
    file = open_rollouts(tmp_path / "t")
    found = file.read()
    assert (file.format, file.container) == ("trace", "trace")
    assert found[0].rollout_id == "0/0" and found[-1].rollout_id == "1/8"
    same(found[:9], truth())
    same(found[9:], truth(seed=1))
    assert len(RolloutBatch(found).groups()) == 6
    assert load_rollouts(tmp_path / "t", limit=4) == found[:4]
    with pytest.raises(ConfigError, match=r"format is 'verl', and .* is of the kind 'trace'"):
        load_rollouts(tmp_path / "t", format="verl")
    path = write_json(tmp_path / "x.jsonl", rows_of(dumps.own(truth())))
    with pytest.raises(ConfigError, match=r"format is 'trace', and .* is of the kind 'JSON lines'"):
        load_rollouts(path, format="trace")
    assert load_rollouts(tmp_path / "t", format="trace") == found


def test_a_trace_is_given_as_its_folder(tmp_path: Path) -> None:
    with record(tmp_path / "t") as trace:
        with pytest.raises(RolloutError, match=r"t holds no rollouts: it is empty"):
            load_rollouts(tmp_path / "t")
        trace.add(truth())
    for name in ("trace.json", "batch-000000.safetensors"):
        with pytest.raises(RolloutError, match=rf"{name} is a part of a trace.* Give its folder"):
            load_rollouts(tmp_path / "t" / name)
        with pytest.raises(RolloutError, match="is a part of a trace"):
            load_rollouts(tmp_path / "t" / name, on_error="skip")
    # A file of rollouts may have any name, and lie anywhere.
    own = write_json(tmp_path / "t" / "mine.jsonl", rows_of(dumps.own(truth())))
    same(load_rollouts(own), truth())
    (tmp_path / "s").mkdir()
    own = write_json(tmp_path / "s" / "trace.json", rows_of(dumps.own(truth())))
    same(load_rollouts(own), truth())


def test_skipping_counts_what_it_skips(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = rows_of(dumps.own(truth()))
    rows[1]["loss_mask"] = rows[1]["loss_mask"][:-1]
    rows[4]["token_ids"][0] = -1
    rows[6]["token_ids"][2] = 2**31
    path = write_json(tmp_path / "x.jsonl", rows)
    with path.open("a") as file:
        file.write("{broken\n")
    reader = open_rollouts(path, on_error="skip")
    with caplog.at_level(logging.WARNING, logger="forkpoint"):
        found = reader.read()
    kept = [r for n, r in enumerate(truth()) if n not in (1, 4, 6)]
    same(found, kept)
    assert reader.skipped.count == 4
    assert reader.skipped.fields == {"token_ids": 2, "loss_mask": 1, "JSON": 1}
    assert "line 2" in reader.skipped.messages[0] and "line 10" in reader.skipped.messages[3]
    assert "4 skipped (token_ids 2, " in caplog.text and "line 2" in caplog.text
    with pytest.raises(RolloutError, match="line 2"):
        load_rollouts(path)
    assert len(list(reader)) == len(kept), "it can be read again"
    assert reader.skipped.count == 4


def test_skipping_what_is_before_the_first_known_record(tmp_path: Path) -> None:
    """A heading, or a damaged first record, tells no format; the next one does."""
    rows = [{"kind": "heading"}, {"loss_mask": [0]}, *rows_of(dumps.trl(truth()))]
    path = write_json(tmp_path / "x.jsonl", rows)
    with pytest.raises(RolloutError, match=r"line 1 has no known format"):
        load_rollouts(path)
    reader = open_rollouts(path, on_error="skip")
    same(reader.read(), truth())
    assert reader.format == "trl" and reader.skipped.fields == {"format": 2}
    path = write_json(tmp_path / "y.jsonl", rows[:2])
    with pytest.raises(
        RolloutError, match=r"2 skipped \(format 2\); first: .* line 1 has no known for"
    ):
        load_rollouts(path, on_error="skip")


def test_arguments_that_are_refused(tmp_path: Path) -> None:
    path = write_json(tmp_path / "x.jsonl", rows_of(dumps.own(truth())))
    with pytest.raises(ConfigError, match=r"format is 'tlr'; allowed are forkpoint, verl"):
        load_rollouts(path, format="tlr")
    with pytest.raises(ConfigError, match="on_error is 'ignore'"):
        load_rollouts(path, on_error="ignore")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="limit is True"):
        load_rollouts(path, limit=True)
    assert set(FORMATS) >= {"forkpoint", "verl", "trl", "openrlhf", "nemo-rl", "prime-rl", "slime"}


def test_rollouts_outlive_their_file(tmp_path: Path) -> None:
    """Arrays of a mapped file would change, or end the process, where it is written again."""
    ids, mask = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0, 1], [0, 1]])
    table = {"token_ids": ids, "loss_mask": mask, "advantage": torch.ones(2), "extra": ids.double()}
    path = write_torch(tmp_path / "x.pt", table)
    found = load_rollouts(path)
    path.write_bytes(b"")
    assert [r.token_ids.tolist() for r in found] == ids.tolist()
    assert [r.extras["extra"].tolist() for r in found if r.extras] == ids.tolist()


def test_a_url_is_fetched(tmp_path: Path) -> None:
    """By fsspec, of which the protocol for memory takes no network."""
    fsspec = pytest.importorskip("fsspec")
    path = write_json(tmp_path / "x.jsonl", rows_of(dumps.own(truth())))
    fsspec.filesystem("memory").pipe_file("/folder/x.jsonl", path.read_bytes())
    file = open_rollouts("memory://folder/x.jsonl")
    same(file.read(), truth())
    copy = file.path
    assert copy.name == "x.jsonl" and copy.exists()
    del file
    assert not copy.parent.exists()
    with pytest.raises(RolloutError, match=r"memory://none cannot be fetched: FileNotFoundError"):
        load_rollouts("memory://none")
    with pytest.raises(RolloutError, match="nowhere://x cannot be fetched"):
        load_rollouts("nowhere://x")
