"""Steps of two ranks, and of four, leave the gradients of one process with all rollouts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from processes import run_ranks
from scenarios_of_ranks import (
    BAR,
    DEEP,
    EMPTY,
    HOSTED,
    UNEQUAL,
    Scenario,
    compared,
    group,
    head_alone,
    in_hybrid_mesh,
    kept_gathered,
    replicated,
    routed,
    sharded,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

from forkpoint import Config, Rollout
from forkpoint.losses import DPO, GRPO, GSPO, SFT, ValueLoss
from forkpoint.testing import tiny_model
from hybrids import tiny_hybrid
from lanes import slow_besides


def norm_and_head(model: Any) -> nn.Module:
    fully_shard([model.model.norm, model.lm_head])
    return sharded(model)


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()


def lora() -> nn.Module:
    options = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(tiny_model("qwen3", dtype=torch.float64), options)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would leave the other factor without gradients
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def frozen_but(layer: int) -> Any:
    def freeze(model: Any) -> None:
        model.requires_grad_(False)
        model.model.layers[layer].requires_grad_(True)

    return freeze


def untied() -> nn.Module:
    return tiny_model("qwen3", dtype=torch.float64, tie_word_embeddings=False)


def pairs(rank: int, count: int) -> list[Rollout]:
    """Pairs with a chosen and a rejected rollout, and log-probs of a reference."""
    rng = np.random.default_rng(rank)
    found = []
    for number in range(count):
        for rollout, advantage in zip(
            group(10 * rank + number, 2, 16, 9), (1.0, -1.0), strict=True
        ):
            reference = rng.normal(-4, 0.3, len(rollout.token_ids))
            found.append(replace(rollout, advantage=advantage, reference_logprobs=reference))
    return found


def critic() -> nn.Module:
    return tiny_model("qwen3", critic=True, dtype=torch.float64).train()


def valued(rollouts: list[Rollout]) -> list[Rollout]:
    """With returns and values of an earlier critic."""
    rng = np.random.default_rng(5)
    return [
        replace(
            r,
            returns=rng.normal(size=len(r.token_ids)),
            old_values=rng.normal(size=len(r.token_ids)),
        )
        for r in rollouts
    ]


def with_experts() -> nn.Module:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return tiny_model("qwen3_moe", dtype=torch.float64, experts_implementation="eager", **sizes)


def gated_linear_attention() -> nn.Module:
    return tiny_hybrid("qwen3_5_text", dtype=torch.float64)


def mamba() -> nn.Module:
    return tiny_hybrid("granitemoehybrid", dtype=torch.float64)


HOSTED_EXPERTS: dict[str, Any] = {"make": with_experts, "config": HOSTED}
SCENARIOS = {
    "fully_shard, two passes": Scenario(loss=GSPO()),
    "fully_shard, SFT, forks within": Scenario(
        loss=SFT(), config=replace(DEEP, boundary="mixed", max_microbatch_tokens=64)
    ),
    "fully_shard, a rank without rollouts": Scenario(rollouts=EMPTY),
    "fully_shard, the first without": Scenario(rollouts=(EMPTY[1], []), config=Config()),
    "fully_shard, accumulated": Scenario(steps=2),
    "fully_shard, head alone": Scenario(wrap=head_alone, make=untied),
    "fully_shard, norm and head": Scenario(wrap=norm_and_head, make=untied),
    "fully_shard, kept gathered": Scenario(wrap=kept_gathered),
    "fully_shard, checkpointed": Scenario(alone=checkpointed),
    "fully_shard, recomputed": Scenario(config=replace(DEEP, activations="recompute")),
    "fully_shard, LoRA": Scenario(make=lora),
    "fully_shard, hosted": Scenario(config=HOSTED),
    "fully_shard, hosted, a rank without rollouts": Scenario(config=HOSTED, rollouts=EMPTY),
    "fully_shard, last layer alone": Scenario(alone=frozen_but(-1)),
    "fully_shard, first layer alone": Scenario(alone=frozen_but(0)),
    "fully_shard, a critic": Scenario(
        make=critic, loss=ValueLoss(), rollouts=tuple(map(valued, UNEQUAL))
    ),
    "fully_shard, gated linear attention": Scenario(make=gated_linear_attention),
    "fully_shard, Mamba-2": Scenario(make=mamba),
    "fully_shard, replayed experts": Scenario(
        make=with_experts, rollouts=tuple(map(routed, UNEQUAL))
    ),
    "DDP, hosted experts": Scenario(wrap=replicated, **HOSTED_EXPERTS, loss=GSPO()),
    "DDP, DPO": Scenario(wrap=replicated, rollouts=(pairs(0, 3), pairs(1, 1)), loss=DPO()),
    "DDP, a rank without rollouts": Scenario(wrap=replicated, rollouts=EMPTY),
    "DDP, LoRA": Scenario(wrap=replicated, make=lora),
    "DDP, first layer alone": Scenario(wrap=replicated, alone=frozen_but(0)),
    "DDP, sums in float32": Scenario(
        wrap=replicated, config=replace(DEEP, grad_accumulation_dtype="float32"), steps=2
    ),
}


IN_CORE = ("fully_shard, two passes",)


@pytest.mark.parametrize("name", slow_besides(IN_CORE, SCENARIOS))
def test_gradients_are_those_of_one_process(name: str) -> None:
    found = run_ranks(2, compared, SCENARIOS[name])
    for rank in found:
        assert rank["error"] < BAR, rank
        assert rank["loss"] < BAR
        assert rank["tokens"][0] == rank["tokens"][1]
    assert any(rank["shared"] for rank in found)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [GRPO(clip=0.2), GSPO()], ids=["one pass", "two passes"])
def test_four_ranks_of_a_hybrid_mesh(loss: Any) -> None:
    """Shards over two ranks, replicas over two."""
    rollouts = (*UNEQUAL, [], group(7, 4, 11, 6))
    for rank in run_ranks(4, compared, Scenario(wrap=in_hybrid_mesh, rollouts=rollouts, loss=loss)):
        assert rank["error"] < BAR, rank
        assert rank["loss"] < BAR
