"""Two ranks with unequal rows, by DistributedDataParallel and by fully_shard, beside stock TRL.

accelerate shards nothing on CPUs, so that the tests shard the model themselves, as it would.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import setups_trl as setups
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from cases_trl import ACROSS, OURS, STOCK, TIMES
from changes_trl import backwards, pulled, scaled, squared
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trl.trainer import utils

from forkpoint.errors import UnsupportedError

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from processes import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(150)]


def _shard(trainer: Any) -> None:
    for block in trainer.model.model.layers:
        fully_shard(block)
    fully_shard(trainer.model)
    trainer.accelerator.prepare_model = lambda model, **_: model


def _begin() -> None:
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def _work(
    kind: str,
    sharded: bool,
    options: dict[str, Any],
    made: dict[str, Any],
    folder: Path,
    change: Callable[[Any], type] = lambda base: base,
) -> tuple[float, float, list[Any]]:
    """The differences of gradients and of metrics, and the tokens that were run."""
    _begin()
    gradients, logs = [], []
    for name, classes, own in (("stock", STOCK, {}), ("ours", OURS, {"forkpoint": ACROSS})):
        cls = change(classes[kind])
        trainer = setups.trainer(kind, cls, folder / name, made=made, own=own, **options)
        assert trainer.aux_loss_enabled is ("model" in made)
        if sharded:
            _shard(trainer)
        found, log = setups.run(trainer)
        gradients.append(
            {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in found.items()}
        )
        logs.append(log)
    assert trainer.accelerator.num_processes == 2
    assert ("aux_loss" in logs[1][0]) is ("model" in made)
    assert any("eval_aux_loss" in log for log in logs[1]) is ("eval_dataset" in made)
    metrics = max(
        abs(ours[name] - value) / max(1.0, abs(value))
        for stock, ours in zip(*logs, strict=True)
        for name, value in stock.items()
        if isinstance(value, float) and not any(part in name for part in TIMES)
    )
    tokens = [logs[1][0][f"forkpoint/{kind}_tokens"] for kind in ("computed", "given")]
    return setups.apart(*gradients), metrics, tokens


@pytest.mark.parametrize(
    ("kind", "sharded", "options"),
    [
        ("grpo", False, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        ("grpo", False, {"cast_lm_head_to_fp32": True, "beta": 0.1}),
        ("dpo", True, {"gradient_checkpointing": True, "use_weighting": True}),
    ],
)
def test_two_ranks(kind: str, sharded: bool, options: dict[str, Any], tmp_path: Path) -> None:
    _check(run_ranks(2, _work, kind, sharded, options, {}, tmp_path, limit_s=120.0))


@pytest.mark.parametrize(
    ("kind", "change", "sharded"), [("dpo", squared, False), ("grpo", backwards, True)]
)
def test_subclasses(
    kind: str, change: Callable[[Any], type], sharded: bool, tmp_path: Path
) -> None:
    options = {"max_steps": 2}
    _check(run_ranks(2, _work, kind, sharded, options, {}, tmp_path, change, limit_s=120.0))


def test_a_load_balancing_loss_that_is_scaled(tmp_path: Path) -> None:
    made = {"model": setups.mixture()}
    _check(run_ranks(2, _work, "dpo", False, {}, made, tmp_path, scaled, limit_s=120.0))


def _pulled(folder: Path) -> str:
    """The error of a loss with a term of parameters."""
    _begin()
    trainer = setups.trainer("grpo", pulled(OURS["grpo"]), folder)
    with pytest.raises(UnsupportedError) as caught:
        trainer.train()
    return str(caught.value)


def test_a_term_of_parameters_is_refused(tmp_path: Path) -> None:
    for error in run_ranks(2, _pulled, tmp_path, limit_s=120.0):
        assert "such as those of a term of parameters" in error


def _other_head(sharded: bool, folder: Path) -> str:
    """The error of a rank of which one has another head."""
    _begin()
    trainer = setups.trainer("grpo", OURS["grpo"], folder)
    if sharded:
        _shard(trainer)
    if dist.get_rank() == 1:
        utils.add_fused_lm_head(trainer.model, temperature=2.0, outputs=("log_probs", "entropy"))
    with pytest.raises(UnsupportedError) as caught:
        trainer.train()
    return str(caught.value)


def test_a_head_of_one_rank_alone(tmp_path: Path) -> None:
    first, second = run_ranks(2, _other_head, True, tmp_path, limit_s=120.0)
    assert "another rank has found" in first and "at temperature 0.9" in second


def _masked(folder: Path) -> int:
    """Steps of a training whose completions are all masked."""
    _begin()
    options = {"mask_truncated_completions": True, "max_completion_length": 1, "max_steps": 3}
    options |= {"per_device_train_batch_size": 1, "num_generations": 2, "num_iterations": 3}
    trainer = setups.trainer(
        "rloo", OURS["rloo"], folder, made={"model": setups.mixture()}, **options
    )
    _shard(trainer)
    trainer.train()
    return trainer.state.global_step


def test_masked_completions_on_sharded_ranks(tmp_path: Path) -> None:
    """A forward between the micro-batches would gather weights anew."""
    assert run_ranks(2, _masked, tmp_path, limit_s=120.0) == [3, 3]


@pytest.mark.parametrize(
    ("kind", "sharded", "options"),
    [
        ("grpo", False, {"importance_sampling_level": "sequence", "loss_type": "grpo"}),
        ("grpo", True, {"gradient_accumulation_steps": 3, "steps_per_generation": 2}),
        ("dpo", True, {"max_steps": 2, "use_weighting": True}),
    ],
)
def test_router_losses(kind: str, sharded: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """Each rank adds those of its own micro-batches, and gradients are averaged."""
    made = {"model": setups.mixture()}
    _check(run_ranks(2, _work, kind, sharded, options, made, tmp_path, limit_s=120.0))


def test_router_losses_in_evaluation(tmp_path: Path) -> None:
    """Of the last rows one alone is new: one rank's loss counts, and the other's does not."""
    made = {"model": setups.mixture(), "eval_dataset": setups.pairs(9)}
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
    _check(run_ranks(2, _work, "dpo", True, options, made, tmp_path, limit_s=120.0))


def _check(found: list[tuple[float, float, list[Any]]]) -> None:
    for gradients, metrics, (computed, given) in found:
        assert gradients < 2e-6
        assert metrics < 1e-5
        assert computed < given
    assert found[0][2] != found[1][2], "the ranks have rows of other lengths"
