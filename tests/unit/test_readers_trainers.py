"""Files of single trainers besides batches of columns: critics, objects, samples, lines."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dumps
from dumps import prompt_of, rows_of, same, tensors, truth, write_json, write_torch
from forkpoint import Rollout, RolloutBatch, RolloutError, load_rollouts, losses
from forkpoint.rollouts.traces import FORMATS, open_rollouts

FIXTURES = Path(__file__).parents[1] / "fixtures"
CRITICS = [dumps.verl_critic, dumps.openrlhf_critic, dumps.nemo_rl_critic, dumps.slime_critic]


@pytest.mark.parametrize(
    ("make", "container"),
    list(zip(CRITICS, ("torch", "safetensors", "parquet", "rows"), strict=True)),
)
def test_what_a_critic_gave(make: Any, container: str, tmp_path: Path) -> None:
    """Values and returns stand at the tokens that they are of; padding is not read."""
    wanted = dumps.with_critic(truth())
    found = load_rollouts(dumps.write(tmp_path / "x", container, make(wanted)))
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


# TRL's own files ---------------------------------------------------------------------------------


def test_a_batch_of_trl() -> None:
    """Inputs that TRL 1.16.0's GRPOTrainer handed to its loss (tests/fixtures/make_trl.py)."""
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


def test_openrlhf_samples_of_text_alone(tmp_path: Path) -> None:
    """Each an Experience of one, whose images are a list of None where there are none."""
    rows = [
        {k: torch.from_numpy(v[n]) for k, v in dumps.openrlhf(truth()).items() if np.ndim(v) == 2}
        for n in range(len(truth()))
    ]
    none = {"images": [None], "mm_train_inputs": [None], "prompts": ["text"], "info": {}}
    same(load_rollouts(write_torch(tmp_path / "x.pt", [row | none for row in rows])), truth())
    for media in ({"images": ["a.png"]}, {"mm_train_inputs": [{"pixel_values": torch.ones(2)}]}):
        with pytest.raises(RolloutError, match=rf"item 0: {next(iter(media))} has media"):
            load_rollouts(write_torch(tmp_path / "x.pt", [row | none | media for row in rows]))


@pytest.mark.parametrize(
    "media",
    [torch.ones(2, 2), torch.tensor(1), "a.png", {"pixel_values": [1]}, [None, 0]],
    ids=repr,
)
def test_media_are_refused_in_any_form(media: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    row = {"tokens": [1, 2], "response_length": 1, "reward": 1.0}
    for nothing in (None, [], {}, [None, None], {"pixel_values": None}, torch.ones(0)):
        write_torch(path, [row | {"multimodal_inputs": nothing}])
        assert len(load_rollouts(path)) == 1
    write_torch(path, [row | {"multimodal_inputs": media}])
    with pytest.raises(RolloutError, match="multimodal_inputs has media"):
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


def assert_normalized(found: list[Rollout]) -> None:
    """Advantages are those of `truth()`, normalised by group."""
    for members in RolloutBatch(truth()).groups():
        own = np.array([truth()[n].advantage for n in members])
        wanted = (own - own.mean()) / own.std()
        np.testing.assert_allclose([found[n].advantage for n in members], wanted)


def test_slime_samples(tmp_path: Path) -> None:
    value = dumps.slime_samples(truth())
    value["samples"][3]["remove_sample"] = True
    found = load_rollouts(write_torch(tmp_path / "3.pt", value))
    assert not found[3].loss_mask.any()
    found[3] = replace(found[3], loss_mask=truth()[3].loss_mask)
    same(found, truth(), "advantage", "reference_logprobs")
    assert_normalized(found)


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


@pytest.mark.parametrize("lines", ["samples", "one batch"])
def test_skyrl_generator_output(lines: str, tmp_path: Path) -> None:
    """Rewards, each one number or per token, become advantages of their groups."""
    table = dumps.skyrl(truth())
    metrics = {"rollout_metrics": table["rollout_metrics"]}
    rows = [row | metrics for row in rows_of(table)] if lines == "samples" else [table]
    file = open_rollouts(write_json(tmp_path / "x.jsonl", rows))
    found = file.read()
    assert file.format == "skyrl" and FORMATS["skyrl"].notes[0] in file.notes
    same(found, truth(), "advantage", "reference_logprobs")
    assert {r.group_id for r in found} == {r.group_id for r in truth()}
    assert_normalized(found)


def test_skyrl_without_log_probs_and_ids(tmp_path: Path) -> None:
    """Equal prompts are groups then, as where ids are text."""
    table = dumps.skyrl(truth()) | {"rollout_logprobs": None}
    for ids in (None, [f"a_{n}" for n in range(len(truth()))]):
        found = load_rollouts(write_json(tmp_path / "x.jsonl", [table | {"trajectory_ids": ids}]))
        assert all(r.old_logprobs is None for r in found)
        groups = RolloutBatch(found).group_index.tolist()
        assert groups == RolloutBatch(truth()).group_index.tolist()
