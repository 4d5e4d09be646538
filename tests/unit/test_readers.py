"""Reading what trainers write: every format, out of every kind of file, gives the same rollouts."""

import json
import logging
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dumps
from dumps import TABLES, prompt_of, rows_of, tensors, truth, write_json, write_torch
from forkpoint import (
    ConfigError,
    Rollout,
    RolloutBatch,
    RolloutError,
    load_rollouts,
    losses,
    record,
)
from forkpoint.forest import sort_rollouts
from forkpoint.traces import FORMATS, open_rollouts

FIXTURES = Path(__file__).parents[1] / "fixtures"


def same(found: list[Rollout], wanted: list[Rollout], *without: str) -> None:
    """All fields are equal, groups as the same partition: not every format names them."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        for name in ("token_ids", "loss_mask", "old_logprobs", "reference_logprobs"):
            if name not in without:
                a, b = getattr(one, name), getattr(other, name)
                assert a is not None and b is not None, name
                np.testing.assert_allclose(
                    np.where(other.loss_mask, a, 0) if name.endswith("logprobs") else a,
                    np.where(other.loss_mask, b, 0) if name.endswith("logprobs") else b,
                    rtol=0,
                    atol=0,
                    err_msg=name,
                )
        if "advantage" not in without:
            assert one.advantage == other.advantage
    groups = RolloutBatch(replace(r, rollout_id=None) for r in found).group_index
    assert groups.tolist() == RolloutBatch(wanted).group_index.tolist()


RAGGED = ("forkpoint", "prime-rl", "prime-rl, two parts", "slime")
CONTAINERS = ("torch", "safetensors", "parquet", "json", "rows", "zst")


@pytest.mark.parametrize(
    ("name", "container"),
    [(n, c) for n in TABLES for c in CONTAINERS if not (c == "safetensors" and n in RAGGED)],
)
def test_formats_in_containers(name: str, container: str, tmp_path: Path) -> None:
    wanted = truth()
    table = TABLES[name](wanted)
    packed = "microbatch" in name
    if container == "torch":
        path = write_torch(tmp_path / "x", tensors(table))
    elif container == "safetensors":
        path = dumps.write_safetensors(tmp_path / "x", table)
    elif container == "parquet":
        if packed:
            table = {key: [value] for key, value in dumps.listed(table).items()}
        path = dumps.write_parquet(tmp_path / "x", table)
    elif container == "json" or packed:
        path = write_json(tmp_path / "x.jsonl", [dumps.listed(table)])
    else:
        suffix = ".zst" if container == "zst" else ".jsonl"
        path = write_json(tmp_path / f"x{suffix}", rows_of(table))
    found = open_rollouts(path)
    rollouts = found.read()
    same(rollouts, wanted)
    assert found.format == name.partition(",")[0]
    assert {"json": "JSON lines", "rows": "JSON lines", "zst": "JSON lines"}.get(
        container, container
    ) == found.container
    assert not found.skipped.count
    assert load_rollouts(path, format=found.format) == rollouts


def test_equal_prompts_share_from_the_first_token(tmp_path: Path) -> None:
    """Left padding is gone: as much is shared as in the rollouts that were dumped."""
    wanted = RolloutBatch(truth())
    path = write_torch(tmp_path / "x", tensors(dumps.verl(list(wanted))))
    found = RolloutBatch(load_rollouts(path))
    for batch in (wanted, found):
        order = sort_rollouts(batch.token_ids, batch.offsets, batch.group_index)
        assert order.shared_edges.sum() > 20
    assert found.token_ids.tolist() == wanted.token_ids.tolist()


@pytest.mark.parametrize("way", ["numpy", "tensordict", "consolidated"])
def test_verl_pickles(way: str, tmp_path: Path) -> None:
    path = tmp_path / "batch.pkl"
    path.write_bytes(dumps.verl_pickle(truth(), way, temperature=0.7))
    found = load_rollouts(path)
    same(found, truth())
    assert {r.temperature for r in found} == {0.7} and found[0].group_id == truth()[0].group_id


def test_verl_as_a_dict_of_its_parts(tmp_path: Path) -> None:
    table = tensors(dumps.verl(truth()))
    uid = table.pop("uid")
    value = {"batch": table, "non_tensor_batch": {"uid": uid}, "meta_info": {"temperature": 0.5}}
    found = load_rollouts(write_torch(tmp_path / "x.pt", value))
    same(found, truth())
    assert {r.temperature for r in found} == {0.5}


def test_verl_takes_what_there_is(tmp_path: Path) -> None:
    """Rollout log-probs for want of old ones, rewards for want of advantages, weights."""
    table = tensors(dumps.verl(truth()))
    table["rollout_log_probs"] = table.pop("old_log_probs")
    table["rollout_is_weights"] = torch.full_like(table["rollout_log_probs"], 0.5)
    scores = torch.zeros_like(table.pop("advantages"))
    rewards = torch.arange(len(scores), dtype=torch.float32)
    scores[:, 0] = rewards
    table["token_level_scores"] = scores
    file = open_rollouts(write_torch(tmp_path / "x.pt", table))
    found = file.read()
    same(found, truth(), "advantage")
    assert {r.weights for r in found} == {0.5}
    for members in RolloutBatch(truth()).groups():
        own = rewards[members].double().numpy()
        expected = (own - own.mean()) / own.std()
        np.testing.assert_allclose([found[n].advantage for n in members], expected)
        assert [found[n].extras for n in members] == [{"reward": r} for r in own.tolist()]
    assert any("advantages are the rewards" in note for note in file.notes)


CRITICS = [dumps.verl_critic, dumps.openrlhf_critic, dumps.nemo_rl_critic, dumps.slime_critic]


@pytest.mark.parametrize(
    ("make", "container"),
    [
        (make, container)
        for make in CRITICS
        for container in ("torch", "safetensors", "parquet", "json")
        if (make, container) != (dumps.slime_critic, "safetensors")  # rows of several lengths
    ],
)
def test_what_a_critic_gave(make: Any, container: str, tmp_path: Path) -> None:
    """Values and returns stand at the tokens that they are of; padding is not read."""
    wanted, path = dumps.with_critic(truth()), tmp_path / "x"
    if container == "torch":
        write_torch(path, tensors(make(wanted)))
    elif container == "safetensors":
        dumps.write_safetensors(path, make(wanted))
    elif container == "parquet":
        dumps.write_parquet(path, make(wanted))
    else:
        write_json(path, rows_of(make(wanted)))
    found = load_rollouts(path)
    same(found, wanted)
    one, other = RolloutBatch(found), RolloutBatch(wanted)
    assert one.returns is not None and other.returns is not None
    assert one.old_values is not None and other.old_values is not None
    own = other.loss_mask
    assert (one.returns[own] == other.returns[own]).all()
    assert (one.old_values[own] == other.old_values[own]).all()
    assert [type(r.returns) for r in found] == [type(r.returns) for r in wanted]
    losses.ValueLoss().check(one)


@pytest.mark.parametrize("make", CRITICS)
def test_returns_without_values_are_no_critics(make: Any, tmp_path: Path) -> None:
    """Where there is no critic, trainers write advantages as returns as well."""
    table = make(dumps.with_critic(truth()))
    values = table.pop("values")
    found = load_rollouts(write_torch(tmp_path / "x.pt", tensors(table)))
    same(found, truth())
    assert all(r.returns is None and r.old_values is None for r in found)
    del table["returns"]
    table["values"] = values  # before advantages and returns are estimated
    found = load_rollouts(write_torch(tmp_path / "y.pt", tensors(table)))
    assert all(r.returns is None and r.old_values is not None for r in found)


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


def test_columns_that_no_field_is_read_from_may_have_any_length(tmp_path: Path) -> None:
    table = {**tensors(dumps.trl(truth())), "timings": [0.5, 0.25], "bins": torch.ones(3, 2)}
    same(load_rollouts(write_torch(tmp_path / "x.pt", table)), truth())


def test_advantages_per_token_stay_so(tmp_path: Path) -> None:
    table = dumps.verl(truth())
    random = np.random.default_rng(0).normal(size=table["advantages"].shape).astype(np.float32)
    table["advantages"] = random
    found = load_rollouts(write_torch(tmp_path / "x.pt", tensors(table)))
    several = 0
    for n, rollout in enumerate(found):
        own = rollout.loss_mask
        values = np.broadcast_to(rollout.advantage, len(rollout))[own]
        begin = prompt_of(truth()[n])
        assert (values == random[n][: len(rollout) - begin][own[begin:]]).all()
        several += np.ndim(rollout.advantage)
    assert several


def test_verl_text_needs_a_tokenizer(tmp_path: Path) -> None:
    lines = [
        {"input": "ab" * (1 + n % 2), "output": "cd", "score": float(n), "step": 3}
        for n in range(4)
    ]
    path = write_json(tmp_path / "3.jsonl", lines)
    with pytest.raises(RolloutError, match=r"3.jsonl, line 1: the record holds text.*tokenizer"):
        load_rollouts(path)
    file = open_rollouts(path, tokenizer=lambda text: list(text.encode()))
    found = file.read()
    assert file.format == "verl-text" and "losses are not exact" in file.notes[0]
    assert [r.token_ids.tolist() for r in found[:2]] == [list(b"abcd"), list(b"ababcd")]
    assert found[0].loss_mask.tolist() == [0, 0, 1, 1]
    assert [r.advantage for r in found] == [-1, -1, 1, 1]


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


# TRL's own files ---------------------------------------------------------------------------------


def test_a_batch_of_trl() -> None:
    """What TRL 1.16.0's GRPOTrainer handed to its loss (tests/fixtures/make_trl.py)."""
    values = json.loads((FIXTURES / "trl-batch.json").read_text())
    file = open_rollouts(FIXTURES / "trl-batch.pt")
    found = file.read()
    assert (file.format, file.container, len(found)) == ("trl", "torch", 6)
    for n, rollout in enumerate(found):
        prompt = [
            i for i, m in zip(values["prompt_ids"][n], values["prompt_mask"][n], strict=True) if m
        ]
        count = sum(values["completion_mask"][n])
        assert rollout.token_ids.tolist() == prompt + values["completion_ids"][n][:count]
        assert rollout.loss_mask.tolist() == [0] * len(prompt) + [1] * count
        assert rollout.advantage == values["advantages"][n]
        assert rollout.old_logprobs is not None and rollout.reference_logprobs is not None
        own = slice(len(prompt), None)
        assert rollout.old_logprobs[own].tolist() == values["old_per_token_logps"][n][:count]
        assert rollout.reference_logprobs[own].tolist() == values["ref_per_token_logps"][n][:count]
    # The padding token was sampled as well, so that ids would have told padding wrongly.
    assert 0 in found[0].token_ids.tolist() and 0 in values["prompt_ids"][3]
    assert [len(group) for group in RolloutBatch(found).groups()] == [3, 3]


@pytest.mark.parametrize("suffix", ["pt", "pkl", "jsonl"])
def test_samples_of_async_trl(suffix: str) -> None:
    """Objects of TRL 1.16.0's RolloutSample, by torch.save, pickle.dump and as JSON."""
    file = open_rollouts(FIXTURES / f"trl-async.{suffix}")
    found = file.read()
    assert file.format == "trl-async"
    assert [r.token_ids.tolist() for r in found[:2]] == [
        [2, 3, 4, 5, 5, 5],
        [2, 3, 4, 6, 6, 6, 6, 6],
    ]
    assert [r.loss_mask.astype(int).tolist() for r in found[:2]] == [
        [0, 0, 0, 1, 1, 1],
        [0, 0, 0, 1, 0, 0, 1, 1],
    ]
    assert found[1].old_logprobs is not None
    assert found[1].old_logprobs.tolist() == [0, 0, 0, -0.5, 0, 0, -0.5, -0.5]
    assert [r.advantage for r in found] == [0.5, -0.5, 0.5, -0.5]
    assert [r.group_id for r in found] == ["0", "0", "1", "1"]


def test_completions_that_are_masked_stay_in_their_group(tmp_path: Path) -> None:
    """TRL masks truncated completions wholly; an importance ratio becomes weights."""
    table = tensors(dumps.trl(truth()))
    table["completion_mask"][0] = 0
    table["importance_sampling_ratio"] = torch.full((len(truth()), 1), 0.25)
    del table["old_per_token_logps"]
    found = load_rollouts(write_torch(tmp_path / "x.pt", table))
    first = truth()[0]
    assert len(found[0]) == prompt_of(first) and not found[0].loss_mask.any()
    groups = RolloutBatch(found).group_index.tolist()
    assert groups == RolloutBatch(truth()).group_index.tolist()
    assert {r.weights for r in found} == {0.25} and found[1].old_logprobs is None


# Other ways of the same formats ------------------------------------------------------------------


def test_openrlhf_objects(tmp_path: Path) -> None:
    """A list of Experience objects, of which the class is not there to be imported."""
    name = "openrlhf.trainer.ppo_utils.experience"
    kind = type("Experience", (), {"__module__": name})
    dumps.add_module(name).Experience = kind
    made = []
    for part in (truth()[:4], truth()[4:]):
        one: Any = kind()
        one.__dict__.update(tensors(dumps.openrlhf(part)))
        made.append(one)
    path = write_torch(tmp_path / "x.pt", made)
    file = open_rollouts(path)
    same(file.read(), truth())
    assert file.format == "openrlhf"


def test_openrlhf_samples_of_text_alone(tmp_path: Path) -> None:
    """Each an Experience of one, whose images are a list of None where there are none."""
    rows = [
        {k: torch.from_numpy(v[n]) for k, v in dumps.openrlhf(truth()).items() if np.ndim(v) == 2}
        for n in range(len(truth()))
    ]
    none = {"images": [None], "mm_train_inputs": [None], "prompts": ["text"], "info": {}}
    same(load_rollouts(write_torch(tmp_path / "x.pt", [row | none for row in rows])), truth())
    for media in ({"images": ["a.png"]}, {"mm_train_inputs": [{"pixel_values": torch.ones(2)}]}):
        with pytest.raises(RolloutError, match=rf"item 0: {next(iter(media))} holds media"):
            load_rollouts(write_torch(tmp_path / "x.pt", [row | none | media for row in rows]))


@pytest.mark.parametrize(
    "media", [np.ones((2, 2)), np.array(1), "a.png", {"pixel_values": [1]}, [None, 0]], ids=repr
)
def test_media_are_refused_in_any_form(media: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    row = {"token_ids": [1, 2], "mask": [False, True], "logprobs": [0.0, -1.0], "advantage": 1.0}
    for nothing in (None, [], {}, [None, None], {"pixel_values": None}, np.array([None])):
        path.write_bytes(pickle.dumps([row | {"mm_kwargs": nothing}]))
        assert len(load_rollouts(path)) == 1
    path.write_bytes(pickle.dumps([row | {"mm_kwargs": media}]))
    with pytest.raises(RolloutError, match="mm_kwargs holds media"):
        load_rollouts(path)


def test_nemo_rl_lines(tmp_path: Path) -> None:
    """train_data_step1.jsonl: each line is a batch of one, and samples can be masked."""
    table = dumps.nemo_rl(truth())
    table["token_ids"] = table.pop("input_ids")
    table["token_loss_mask"] = table.pop("token_mask")
    table["sample_loss_mask"] = table.pop("sample_mask")
    table["sample_loss_mask"][2] = 0
    lines = [{k: [v] for k, v in row.items()} | {"idx": n} for n, row in enumerate(rows_of(table))]
    found = load_rollouts(write_json(tmp_path / "train_data_step1.jsonl", lines))
    wanted = truth()
    assert not found[2].loss_mask.any()
    found[2] = replace(found[2], loss_mask=wanted[2].loss_mask, advantage=wanted[2].advantage)
    same(found, wanted)


def test_slime_samples(tmp_path: Path) -> None:
    value = dumps.slime_samples(truth())
    value["samples"][3]["remove_sample"] = True
    found = load_rollouts(write_torch(tmp_path / "3.pt", value))
    assert not found[3].loss_mask.any()
    found[3] = replace(found[3], loss_mask=truth()[3].loss_mask)
    same(found, truth(), "advantage", "reference_logprobs")
    for members in RolloutBatch(truth()).groups():
        own = np.array([truth()[n].advantage for n in members])
        np.testing.assert_allclose(
            [found[n].advantage for n in members], (own - own.mean()) / own.std()
        )


@pytest.mark.parametrize("version", [1, 2])
def test_slime_train_data(version: int, tmp_path: Path) -> None:
    """save_debug_train_data, of PPO: columns, and samples with the layout of ranks beside them."""
    wanted = dumps.with_critic(truth())
    value = dumps.slime_train_data(dumps.slime_critic(wanted), version)
    file = open_rollouts(write_torch(tmp_path / "3_0.pt", value))
    found = file.read()
    assert file.format == "slime" and file.notes == FORMATS["slime"].notes
    same(found, wanted)
    assert all(r.old_values is not None and r.returns is not None for r in found)


def test_bfloat16_is_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    table = tensors({k: v for k, v in dumps.trl(truth()).items() if isinstance(v, np.ndarray)})
    for name in ("advantages", "old_per_token_logps"):
        table[name] = table[name].bfloat16()
    save_file(table, tmp_path / "x.safetensors")
    found = load_rollouts(tmp_path / "x.safetensors")
    assert found == load_rollouts(write_torch(tmp_path / "x.pt", table))
    assert [r.advantage for r in found] == table["advantages"].tolist()


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


def test_a_record_of_the_format_that_was_asked_for_is_not_taken_for_another(tmp_path: Path) -> None:
    table = dumps.trl(truth())
    table["advantages"][4] = np.nan
    with pytest.raises(RolloutError, match="advantages is nan") as caught:
        load_rollouts(write_torch(tmp_path / "x.pt", tensors(table)), format="trl")
    assert "as asked" not in str(caught.value)


def test_a_trace_is_given_as_its_folder(tmp_path: Path) -> None:
    with record(tmp_path / "t") as trace:
        with pytest.raises(RolloutError, match=r"t holds no rollouts: it has no whole batch yet"):
            load_rollouts(tmp_path / "t")
        trace.add(truth())
    for name in ("manifest.jsonl", "batch-000000.safetensors"):
        with pytest.raises(RolloutError, match=rf"{name} is a part of a trace.* Give its folder"):
            load_rollouts(tmp_path / "t" / name)
        with pytest.raises(RolloutError, match="is a part of a trace"):
            load_rollouts(tmp_path / "t" / name, on_error="skip")
    # A file of rollouts may have any name, and lie anywhere.
    own = write_json(tmp_path / "t" / "mine.jsonl", rows_of(dumps.own(truth())))
    same(load_rollouts(own), truth())
    (tmp_path / "s").mkdir()
    own = write_json(tmp_path / "s" / "manifest.jsonl", rows_of(dumps.own(truth())))
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


def test_skipping_all_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_json(tmp_path / "x.jsonl", [{"token_ids": [], "loss_mask": []}] * 3)
    with pytest.raises(RolloutError, match=r"all of its records were skipped, advantage 3; first"):
        load_rollouts(path, on_error="skip")
    assert not caplog.text, "it is said twice"


def test_arguments_that_are_refused(tmp_path: Path) -> None:
    path = write_json(tmp_path / "x.jsonl", rows_of(dumps.own(truth())))
    with pytest.raises(ConfigError, match=r"format is 'tlr'; allowed are forkpoint, verl"):
        load_rollouts(path, format="tlr")
    with pytest.raises(ConfigError, match="on_error is 'ignore'"):
        load_rollouts(path, on_error="ignore")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        RolloutError, match=r"line 1: there is no prompts.* as asked, and .* is .forkp"
    ):
        load_rollouts(path, format="verl")
    unknown = write_json(tmp_path / "y.jsonl", [{"text": "a"}])
    with pytest.raises(RolloutError, match=r"read as 'verl', as asked, .* of no format that is kn"):
        load_rollouts(unknown, format="verl")
    assert set(FORMATS) >= {"forkpoint", "verl", "trl", "openrlhf", "nemo-rl", "prime-rl", "slime"}


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch) -> None:
    path = dumps.write_parquet(tmp_path / "x.parquet", dumps.own(truth()))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'forkpoint\[parquet\]'"):
        load_rollouts(path)


def test_pickles_of_plain_things(tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(dumps.verl(truth())))
    same(load_rollouts(path), truth())
