"""Text rows of multimodal models that ranks hold: the outer model is what wrappers have."""

from typing import Any

import pytest
from processes import run_ranks
from scenarios_of_ranks import (
    BAR,
    EMPTY,
    UNEQUAL,
    Scenario,
    compared,
    replicated,
    sharded,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

from forkpoint.losses import GSPO
from multimodal_models import tiny_multimodal


def with_tower(model: Any, **options: Any) -> nn.Module:
    """fully_shard of each block of the encoder as well, as accelerate and verl do."""
    for block in model.model.visual.blocks:
        fully_shard(block, **options)
    return sharded(model, **options)


def qwen3_vl() -> nn.Module:
    return tiny_multimodal("qwen3_vl")


def tied() -> nn.Module:
    return tiny_multimodal("gemma3", tie_word_embeddings=True)


def gemma4() -> nn.Module:
    return tiny_multimodal("gemma4")


def llama4() -> nn.Module:
    return tiny_multimodal("llama4")


def with_blocks(model: Any, **options: Any) -> nn.Module:
    """fully_shard of Llama 4, which does not say where its decoder is."""
    for block in model.language_model.model.layers:
        fully_shard(block, **options)
    return fully_shard(model, **options)


SCENARIOS = {
    "fully_shard": Scenario(wrap=with_tower, make=qwen3_vl),
    "weights gathered once": Scenario(wrap=with_tower, make=qwen3_vl, gather="step", steps=2),
    "a rank without rollouts": Scenario(wrap=with_tower, make=qwen3_vl, rollouts=EMPTY),
    "two passes": Scenario(make=tied, loss=GSPO()),
    "DistributedDataParallel": Scenario(wrap=replicated, make=qwen3_vl, rollouts=UNEQUAL),
    "Gemma 4": Scenario(make=gemma4),
    "Gemma 4, DistributedDataParallel": Scenario(wrap=replicated, make=gemma4),
    "Llama 4": Scenario(wrap=with_blocks, make=llama4),
    "Llama 4, DistributedDataParallel": Scenario(wrap=replicated, make=llama4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_are_those_of_one_process(name: str) -> None:
    for found in run_ranks(2, compared, SCENARIOS[name]):
        assert found["error"] < BAR and found["loss"] < BAR, found


def untrained_tower() -> list[str]:
    model = qwen3_vl()
    import torch.distributed as dist

    from forkpoint import RolloutBatch, wrap

    policy = wrap(with_tower(model))
    policy.forward_backward(RolloutBatch(UNEQUAL[dist.get_rank()]), GSPO())
    assert policy.verify(RolloutBatch(UNEQUAL[dist.get_rank()]), GSPO()).passed
    return [n for n, p in model.named_parameters() if p.grad is None]


@pytest.mark.slow
def test_gradients_of_the_tower_stay_none() -> None:
    first, second = run_ranks(2, untrained_tower)
    assert first == second
    assert first and all(name.startswith("model.visual.") for name in first)
