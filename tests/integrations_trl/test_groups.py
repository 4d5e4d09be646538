"""Groups that are kept in one optimizer step."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_trl import ACROSS, LATER, Pair
from trl.trainer import grpo_trainer

from forkpoint.integrations.trl.groups import kept_order, reordered

pytestmark = pytest.mark.filterwarnings("ignore")


def test_order() -> None:
    assert kept_order([2, 0, 2, 1, 0, 1, 2]) == [0, 2, 6, 1, 4, 3, 5]
    assert kept_order([]) == []


def test_rows_move_together() -> None:
    batches = [
        {"a": torch.arange(2) + 2 * i, "n": torch.tensor(7), "l": [2 * i, 2 * i + 1], "x": None}
        for i in range(3)
    ]
    found = reordered(batches, [5, 0, 1, 4, 2, 3])
    assert [one["a"].tolist() for one in found] == [[5, 0], [1, 4], [2, 3]]
    assert [one["l"] for one in found] == [[5, 0], [1, 4], [2, 3]]
    assert all(one["n"] == 7 and one["x"] is None for one in found)


def _keeping(shuffle: Any) -> Any:
    """TRL's shuffle, with the rows of a prompt brought together in the order that it gives."""

    def shuffled(values: dict[str, Any]) -> dict[str, Any]:
        found = shuffle(values)
        rows = [
            tuple(r) for r in torch.cat([found["prompt_ids"], found["prompt_mask"]], 1).tolist()
        ]
        order = sorted(range(len(rows)), key=lambda i: (rows.index(rows[i]), i))
        return {
            k: v[order] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in found.items()
        }

    return shuffled


def test_kept_groups_are_those_of_a_shuffle_that_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, module = "grpo", grpo_trainer
    shuffle = module.shuffle_sequence_dict
    options = {"max_steps": 4, **LATER}
    scattered = Pair(
        kind, tmp_path / "a", own={"forkpoint": ACROSS, "keep_groups": False}, **options
    )
    assert scattered.apart < 2e-6
    scattered.check_metrics()

    own = {"forkpoint": ACROSS, "keep_groups": True}
    monkeypatch.setattr(module, "shuffle_sequence_dict", _keeping(shuffle))
    pair = Pair(kind, tmp_path / "b", own=own, **options)
    assert pair.apart < 2e-6
    pair.check_metrics()
    assert pair.tokens[0] / pair.tokens[1] < scattered.tokens[0] / scattered.tokens[1]


def test_scattered_groups_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "forkpoint"):
        Pair("grpo", tmp_path / "none", **LATER)
        text = [r.getMessage() for r in caplog.records if "keep_groups=True" in r.getMessage()]
        assert len(text) == 1 and "feeds 2 optimizer steps" in text[0]
        caplog.clear()
        Pair("grpo", tmp_path / "off", own={"forkpoint": ACROSS, "keep_groups": False}, **LATER)
        Pair("grpo", tmp_path / "one step")
    assert not [r for r in caplog.records if "keep_groups" in r.getMessage()]
