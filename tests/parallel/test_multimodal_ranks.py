"""Text rows of multimodal models that ranks hold: the outer model is what wrappers have."""

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from processes import run_ranks
from scenarios_of_ranks import BAR, EMPTY, UNEQUAL, Scenario, compared, replicated
from torch import nn
from torch.distributed.fsdp import fully_shard

from forkpoint import RolloutBatch, wrap
from forkpoint.hosts.transformers.families import MULTIMODAL
from forkpoint.losses import GSPO
from multimodal_models import tiny_multimodal


def by_blocks(model: Any, **options: Any) -> nn.Module:
    """fully_shard of each block, also of the encoder, as accelerate and verl do."""
    blocks = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


qwen3_vl, gemma4, llama4 = (
    partial(tiny_multimodal, family) for family in ("qwen3_vl", "gemma4", "llama4")
)
SCENARIOS = {
    **{
        family: Scenario(wrap=by_blocks, make=partial(tiny_multimodal, family))
        for family in MULTIMODAL
    },
    "weights gathered once": Scenario(wrap=by_blocks, make=qwen3_vl, gather="step", steps=2),
    "a rank without rollouts": Scenario(wrap=by_blocks, make=qwen3_vl, rollouts=EMPTY),
    "two passes, tied head": Scenario(
        wrap=by_blocks,
        make=partial(tiny_multimodal, "gemma3", tie_word_embeddings=True),
        loss=GSPO(),
    ),
    "DistributedDataParallel": Scenario(wrap=replicated, make=qwen3_vl, rollouts=UNEQUAL),
    "Gemma 4, DistributedDataParallel": Scenario(wrap=replicated, make=gemma4),
    "Llama 4, DistributedDataParallel": Scenario(wrap=replicated, make=llama4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_are_those_of_one_process(name: str) -> None:
    for found in run_ranks(2, compared, SCENARIOS[name]):
        assert found["error"] < BAR and found["loss"] < BAR, found
        assert found["same have none"]  # those of encoders, in one process


def untrained_tower() -> list[str]:
    model = qwen3_vl()
    policy = wrap(by_blocks(model))
    policy.forward_backward(RolloutBatch(UNEQUAL[dist.get_rank()]), GSPO())
    assert policy.verify(RolloutBatch(UNEQUAL[dist.get_rank()]), GSPO()).passed
    return [n for n, p in model.named_parameters() if p.grad is None]


@pytest.mark.slow
def test_gradients_of_the_tower_stay_none() -> None:
    first, second = run_ranks(2, untrained_tower)
    assert first == second
    assert first and all(name.startswith("model.visual.") for name in first)
