"""Baselines of shared training: dense at its best, and reported as it was measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.attention import Case, dense_lengths
from benchmarks.shapes import make_group, make_model
from benchmarks.steps.plain_loop import PlainLoop, distance
from benchmarks.steps.stepper import Dense, Stepper, Timed, best_dense
from forkpoint.plan import make_plan


def test_what_precedes_the_first_row_is_there_once_in_every_quantile() -> None:
    plan = make_plan(make_group(8, [4] * 2, vocab=64))
    timed = Timed(plan, ms=[110.0, 120.0, 130.0], phase_ms={"leaf": [90.0, 100.0, 110.0]})
    dense = Dense(timed, rollouts=2, row_tokens=12, scale=8.0)
    assert dense.ms == 20 + 8 * 100
    assert dense.quantile(0.0) == 20 + 8 * 90 <= dense.ms <= dense.quantile(0.99) == 20 + 8 * 110
    assert dense.scaled(50.0) == 20 + 8 * 30
    assert (
        replace(dense, scale=4.0).note
        == "2 rollouts, scaled by 4; microbatches of at most 12 tokens"
    )


@pytest.mark.parametrize(
    ("prompt", "response", "sample", "tried"),
    [
        (40, 24, 8, {64, 128, 256, 512}),  # up to eight in a row, so that eight are run
        (100, 50, 3, {150, 300}),  # four would be 600 tokens
        (600, 100, 2, {700, 1400}),  # two in a row are always tried
    ],
)
def test_dense_of_short_rollouts_has_long_rows_too(
    prompt: int, response: int, sample: int, tried: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = Stepper(make_model("llama3-8b", "cpu", dtype=torch.float32, layers=1, tiny=True))
    batch = make_group(prompt, [response] * 16, vocab=stepper.vocab)
    rows: set[int] = set()

    def repeat(policy, batch, *, repeats, into):
        rows.add(policy.config.max_microbatch_tokens)
        assert len(batch) == sample
        # The longest rows are the fastest.
        into.ms.append(1e6 / policy.config.max_microbatch_tokens)
        return into

    monkeypatch.setattr(stepper, "repeat", repeat)
    dense, policy, some = best_dense(stepper, batch, sample=2, row_tokens=512)
    assert rows == tried and policy.config.max_microbatch_tokens == dense.row_tokens == max(tried)
    assert len(some) == dense.rollouts == sample and dense.scale == pytest.approx(16 / sample)


def test_so_many_dense_sequences_are_timed() -> None:
    ragged = Case("ragged", 100, tuple(range(1, 9)))
    assert dense_lengths(ragged, ragged=True) == [101, 102]
    # A kernel for equal lengths alone has one of them.
    assert dense_lengths(ragged, ragged=False) == [101]
    assert len(dense_lengths(replace(ragged, suite="small"), ragged=True)) == 8
    assert dense_lengths(Case("dualkv", 100, (7,) * 8), ragged=False) == [107, 107]


def test_a_distance_leaves_both_gradients_as_they_are() -> None:
    found, wanted = [torch.tensor([1.0, 3.0])], [torch.tensor([1.0, 1.0])]
    for _ in range(2):
        assert distance(found, wanted, torch.device("cpu")) == pytest.approx(2 / 2**0.5)
    assert found[0].tolist() == [1.0, 3.0] and wanted[0].tolist() == [1.0, 1.0]


def test_groups_without_advantages_get_random_ones(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    with file.open("w") as f:
        for group, advantage in (("a", 0.0), ("a", 0.0), ("b", 1.0), ("b", -1.0)):
            row = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "advantage": advantage}
            f.write(json.dumps({**row, "group_id": group}) + "\n")
    (name, drawn), (_, kept) = PlainLoop(file=file, batches=2)._inputs(512)
    assert name == "rollouts.jsonl, groups 0 to 0, 6 tokens, random advantages"
    assert all(drawn.advantages != 0) and kept.advantages.tolist() == [1, 1, 1, -1, -1, -1]
