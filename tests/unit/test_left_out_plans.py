"""Plans that leave out what gives no gradient: counted from the rollouts, path by path."""

import json
from pathlib import Path

import numpy as np
import pytest

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.apps.cli import main
from forkpoint.plan import Totals, make_plan
from forkpoint.plan.runs import LeftOut, run_lengths


def group(name: str, first: int, count: int, advantage: float, tail: int = 0) -> list[Rollout]:
    """A prompt of 20 tokens, and responses of 10, after which `tail` tokens are not trained."""
    prompt, mask = list(range(first, first + 20)), [0] * 20 + [1] * 10 + [0] * tail
    return [
        Rollout([*prompt, n, *range(9 + tail)], mask, advantage, group_id=name)
        for n in range(count)
    ]


HALF = RolloutBatch([*group("a", 30, 4, 0.0), *group("b", 60, 4, 1.0, 3), *group("c", 30, 1, 2.0)])


def test_what_runs_of_each_rollout() -> None:
    masks = [[0, 0, 1, 0], [0, 0, 0, 0], [0], [0, 1], [0, 1, 0, 1]]
    batch = RolloutBatch(Rollout(range(len(m)), m, 1.0, group_id="g") for m in masks)
    assert run_lengths(batch).tolist() == [2, 0, 0, 1, 3]
    zero = np.array([True, False, False, True, False])
    assert run_lengths(batch, zero).tolist() == [0, 0, 0, 0, 3]
    assert run_lengths(batch, zero, whole=True).tolist() == [3, 3, 0, 1, 3]
    assert run_lengths(batch, whole=True, last_tokens=True).tolist() == [4, 4, 1, 2, 4]
    assert run_lengths(RolloutBatch([])).tolist() == []
    found = LeftOut.of(batch, run_lengths(batch, zero))
    assert found == LeftOut(rollouts=3, groups=0, rollout_tokens=4 + 4 + 2, tail_tokens=0)
    assert found + LeftOut(1, 2, 3, 4) == LeftOut(4, 2, 13, 4)


def test_groups_without_gradient() -> None:
    zero = HALF.advantages[HALF.offsets[:-1]] == 0
    plan = make_plan(HALF, config=Config(sharing="tree"), runs=run_lengths(HALF, zero))
    assert plan.left_out == LeftOut(4, 1, 4 * 30, 4 * 3)
    # The prompt is run for the one rollout that is left of those that have it.
    assert plan.computed_tokens == 29 + 19 + 4 * 10
    assert plan.dense.tokens == 5 * 29 and plan.logical_tokens == 9 * 30 + 12
    assert plan.bound == 5 * 29 / (29 + 59)
    assert plan.unique_tokens == make_plan(HALF).unique_tokens
    totals = Totals()
    totals.add(HALF, plan)
    assert totals.work["none"] == plan.dense and totals.left_out == plan.left_out
    assert totals.bound("tree") == plan.bound
    without = make_plan(HALF, config=Config(sharing="none"), runs=run_lengths(HALF, zero))
    assert without.computed_tokens == without.dense.tokens == 5 * 29 and without.bound == 1


def test_the_command_line_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "half.jsonl")
    forkpoint.save_rollouts(file, HALF)

    def shown(*options: str) -> str:
        assert main(["plan", file, "--sharing", "group", *options]) == 0
        return capsys.readouterr().out

    assert "left out      132 of 282 tokens: 4 rollouts (1 of 3 groups) without" in shown()
    result = json.loads(shown("--json"))
    assert result["left_out"] == {
        "rollouts": 4, "groups": 1, "rollout_tokens": 120, "tail_tokens": 12,
    }  # fmt: skip
    assert result["modes"]["none"]["tokens"] == 145 and result["bound"] == 145 / 88
    for options in (("--all-logprobs",), ("--loss", "sft")):
        result = json.loads(shown("--json", *options))
        assert result["left_out"]["rollouts"] == 0 and result["left_out"]["tail_tokens"] == 12
    assert "left out" not in shown("--limit", "4", "--all-logprobs")


def test_rewards_are_no_advantages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reward of 0 is a negative advantage, perhaps."""
    lines = [
        {
            "tokens": r.token_ids.tolist(),
            "response_length": len(r) - 20,
            "loss_mask": r.loss_mask[20:].astype(int).tolist(),
            "reward": float(n % 2),
            "group_index": n // 4,
        }
        for n, r in enumerate(HALF)
    ]
    file = tmp_path / "rewards.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["plan", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"]["rollouts"] == 0
