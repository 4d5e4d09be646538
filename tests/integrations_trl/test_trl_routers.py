"""Load-balancing losses of mixtures of experts, beside those of stock TRL."""

from pathlib import Path
from typing import Any

import pytest
import setups_trl as setups
from cases_trl import ACROSS, LATER, Pair

from forkpoint import Config

BAR = 2e-6
pytestmark = pytest.mark.filterwarnings("ignore")


def _pair(kind: str, folder: Path, **more: Any) -> Pair:
    made = {"model": setups.mixture(), **more.pop("made", {})}
    pair = Pair(kind, folder, made=made, **more)
    assert pair.ours.aux_loss_enabled and "aux_loss" in pair.logs[0]
    return pair


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("grpo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        ("grpo", {"beta": 0.1, **LATER}),
        ("grpo", {"gradient_accumulation_steps": 3, "steps_per_generation": 2}),
        ("grpo", {"router_aux_loss_coef": 3.0, "gradient_checkpointing": True}),
        ("rloo", {}),
        ("dpo", {"use_weighting": True, "gradient_accumulation_steps": 1}),
    ],
)
def test_equal_to_stock(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    pair = _pair(kind, tmp_path, max_steps=3, **options)
    assert pair.apart < BAR
    pair.check_metrics()
    computed, given = pair.tokens
    assert computed < given


@pytest.mark.parametrize(("own", "streams"), [(Config(), None), (Config(), False), (ACROSS, False)])
def test_streamed_and_by_the_code_of_trl(own: Config, streams: Any, tmp_path: Path) -> None:
    pair = _pair("grpo", tmp_path, own={"forkpoint": own}, streams=streams, max_steps=2)
    assert pair.ours.sharing.streams is (streams is None)
    assert pair.apart < BAR
    pair.check_metrics()


def test_evaluation(tmp_path: Path) -> None:
    kind, data = "dpo", setups.pairs(5)
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    pair = _pair(kind, tmp_path, made={"eval_dataset": data}, max_steps=2, **options)
    pair.check_metrics()
    assert any("eval_aux_loss" in log for log in pair.logs)


def test_without_it_nothing_is_counted(tmp_path: Path) -> None:
    made = {"model": setups.mixture()}
    pair = Pair("grpo", tmp_path, made=made, router_aux_loss_coef=0.0, max_steps=2)
    assert pair.apart < BAR
    assert "aux_loss" not in pair.logs[0]
