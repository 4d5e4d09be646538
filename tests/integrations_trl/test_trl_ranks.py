"""Two ranks with unequal rows, by DistributedDataParallel and by fully_shard, beside stock TRL.

accelerate shards nothing on CPUs, so that the tests shard the model themselves, as it would.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import setups_trl as setups
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from cases_trl import ACROSS, OURS, STOCK
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from processes import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(150)]


def _shard(trainer: Any) -> None:
    for block in trainer.model.model.layers:
        fully_shard(block)
    fully_shard(trainer.model)
    trainer.accelerator.prepare_model = lambda model, **_: model


def _work(kind: str, sharded: bool, options: dict[str, Any]) -> tuple[float, float, list[Any]]:
    """The differences of gradients and of metrics, and the tokens that were run."""
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    gradients, logs = [], []
    for cls, own in ((STOCK[kind], {}), (OURS[kind], {"forkpoint": ACROSS})):
        with tempfile.TemporaryDirectory() as folder:
            trainer = setups.trainer(kind, cls, Path(folder), own=own, **options)
            if sharded:
                _shard(trainer)
            found, log = setups.run(trainer)
        gradients.append(
            {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in found.items()}
        )
        logs.append(log[0])
    assert trainer.accelerator.num_processes == 2
    names = [k for k, v in logs[0].items() if isinstance(v, float) and "time" not in k]
    metrics = max(abs(logs[1][k] - logs[0][k]) / max(1.0, abs(logs[0][k])) for k in names)
    tokens = [logs[1][f"forkpoint/{kind}_tokens"] for kind in ("computed", "given")]
    return setups.apart(*gradients), metrics, tokens


@pytest.mark.parametrize(
    ("kind", "sharded", "options"),
    [
        ("grpo", False, {}),
        ("grpo", False, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        ("grpo", False, {"loss_type": "grpo", "beta": 0.0, "entropy_coef": 0.1, "bf16": False}),
        ("dpo", False, {}),
        ("dpo", True, {}),
        ("dpo", True, {"gradient_checkpointing": True, "use_weighting": True}),
    ],
)
def test_two_ranks(kind: str, sharded: bool, options: dict[str, Any]) -> None:
    found = run_ranks(2, _work, kind, sharded, options, limit_s=120.0)
    for gradients, metrics, (computed, given) in found:
        assert gradients < 2e-6
        assert metrics < 1e-5
        assert computed < given
    assert found[0][2] != found[1][2], "the ranks have rows of other lengths"
