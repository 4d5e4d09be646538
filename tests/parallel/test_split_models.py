"""Models that transformers splits over ranks leave the gradients of one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from processes import run_ranks
from scenarios_of_ranks import BAR, DEEP, HOSTED, UNEQUAL, group, own_loss, routed, through_logprobs
from split_models import MOE, Split, compared
from test_ranks import checkpointed, frozen_but, gated_linear_attention, mamba, pairs, valued
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import forkpoint
from forkpoint import RolloutBatch
from forkpoint.losses import DPO, GSPO, PPO, Loss, ValueLoss
from lanes import slow_besides
from versions import needs_splits

pytestmark = needs_splits


def adapted(model: Any) -> nn.Module:
    modules = ["q_proj", "v_proj", "up_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=modules))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:  # the same whole factors, whether split or not; zeros would hide one
            whole = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.1
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            with torch.no_grad():
                parameter.copy_(whole)
    return adapted


def through_function(policy: forkpoint.Policy, batch: RolloutBatch, loss: Any) -> float:
    return policy.forward_backward(batch, own_loss).loss


def after_stock_backward(policy: forkpoint.Policy, batch: RolloutBatch, loss: Any) -> float:
    """The model's own backward gives replicated parameters hooks, which stay."""
    model: Any = policy.host.model
    for _ in range(2):  # the second one has the hooks of the first
        model.zero_grad()
        ids = torch.arange(9)[None]
        model(input_ids=ids, labels=ids).loss.backward()
    return policy.forward_backward(batch, loss).loss


LATENT = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
SINKS = {"num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": 7}


class Coupled(Loss):
    """Couples all rollouts, of whatever rank."""

    decomposition = "joint"
    across_ranks = True

    def coupling(self, batch: RolloutBatch) -> Any:
        return 0 * batch.group_index

    def __call__(self, outputs: Any, batch: Any) -> torch.Tensor:
        return (outputs.logprobs * batch.advantages).sum() ** 2 / 1000


EP2 = {"tp_size": 2, "ep_size": 2}
FSDP2_EP2 = {"fsdp_size": 2, "ep_size": 2}
SPLITS: dict[str, Split] = {
    "tensor": Split(),
    "tensor, llama": Split(family="llama"),
    "tensor, tied": Split(sizes={"tie_word_embeddings": True}),
    "tensor, two passes": Split(loss=GSPO()),
    "tensor, accumulated": Split(steps=3),
    "tensor, checkpointed": Split(alone=checkpointed),
    "tensor, recomputed": Split(config=replace(DEEP, activations="recompute")),
    "tensor, offloaded": Split(config=replace(DEEP, activations="offload")),
    "tensor, hosted": Split(config=HOSTED, loss=GSPO()),
    "tensor, checkpointed microbatches": Split(config=replace(DEEP, checkpointing="full")),
    "tensor, wide sums": Split(config=replace(DEEP, grad_accumulation_dtype="float32"), steps=2),
    "tensor, temperatures": Split(
        rollouts=([*group(1, 3, 9, 7), *group(1, 2, 9, 5, temperature=0.7)],)
    ),
    "tensor, a critic": Split(critic=True, loss=ValueLoss(), rollouts=(valued(UNEQUAL[0]),)),
    "tensor, DPO": Split(rollouts=(pairs(0, 3),), loss=DPO()),
    "tensor, PPO": Split(loss=PPO(clip=0.2)),
    "tensor, LoRA": Split(around=adapted),
    "tensor, last layer alone": Split(alone=frozen_but(-1)),
    "tensor, first layer alone": Split(alone=frozen_but(0)),
    "tensor, log-probs": Split(step=through_logprobs),
    "tensor, a function": Split(step=through_function),
    "tensor, gated linear attention": Split(build=gated_linear_attention),
    "tensor, Mamba-2": Split(build=mamba),
    "tensor, latent attention": Split(family="deepseek_v3", sizes=LATENT),
    "tensor, sinks and windows": Split(family="gpt_oss", sizes=SINKS),
    "tensor, biases of inputs": Split(family="qwen2"),
    "tensor, biases of outputs": Split(family="starcoder2", sizes={"use_bias": True}),
    "tensor, fused projections": Split(family="phi3", sizes={"pad_token_id": 0}),
    "tensor, softcaps": Split(family="gemma2", sizes={"query_pre_attn_scalar": 8}),
    "tensor, stock backward before": Split(step=after_stock_backward),
    "tensor, experts": Split(family="qwen3_moe", sizes=MOE),
    "tensor, replayed experts": Split(
        family="qwen3_moe", sizes=MOE, rollouts=(routed(UNEQUAL[0]),), loss=GSPO()
    ),
    "tensor and expert": Split(family="qwen3_moe", sizes=MOE, options=EP2),
    "data and expert": Split(family="qwen3_moe", sizes=MOE, options=FSDP2_EP2, rollouts=UNEQUAL),
    "data and expert, replayed": Split(
        family="qwen3_moe", sizes=MOE, options=FSDP2_EP2, rollouts=tuple(map(routed, UNEQUAL))
    ),
}
FOUR: dict[str, Split] = {
    "tensor x data": Split(options={"tp_size": 2, "fsdp_size": 2}, rollouts=UNEQUAL),
    "tensor x data, tied": Split(
        options={"tp_size": 2, "fsdp_size": 2},
        rollouts=UNEQUAL,
        sizes={"tie_word_embeddings": True},
    ),
    "tensor x data, accumulated": Split(
        options={"tp_size": 2, "fsdp_size": 2}, rollouts=UNEQUAL, steps=3
    ),
    "tensor x data, coupled": Split(
        options={"tp_size": 2, "fsdp_size": 2}, rollouts=UNEQUAL, loss=Coupled()
    ),
    "tensor x replicas": Split(options={"tp_size": 2, "dp_replicate_size": 2}, rollouts=UNEQUAL),
    "tensor x data x expert": Split(
        family="qwen3_moe",
        sizes=MOE,
        options={"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
        rollouts=UNEQUAL,
    ),
    "tensor x data, expert 2": Split(
        family="qwen3_moe",
        sizes=MOE,
        options={"tp_size": 2, "fsdp_size": 2, "ep_size": 2},
        rollouts=UNEQUAL,
    ),
    "a data rank without rollouts": Split(
        options={"tp_size": 2, "fsdp_size": 2}, rollouts=([], group(2, 5, 30, 12))
    ),
    "experts, a data rank without rollouts": Split(
        family="qwen3_moe",
        sizes=MOE,
        options={"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
        rollouts=([], group(2, 5, 30, 12)),
    ),
}
IN_CORE = ("tensor and expert",)


def check(size: int, folder: Path, split: Split) -> list[dict[str, Any]]:
    found = run_ranks(size, compared, split.save(folder), split)
    for rank in found:
        assert rank["error"] < BAR, rank
        assert rank["loss"] < BAR, rank
        assert rank["scores"] < BAR, rank
        assert rank["ranks"] == size
    return found


@pytest.mark.parametrize("name", slow_besides(IN_CORE, SPLITS))
def test_two_ranks_leave_the_gradients_of_one(name: str, tmp_path: Path) -> None:
    check(2, tmp_path, SPLITS[name])


@pytest.mark.parametrize("name", slow_besides((), FOUR))
def test_four_ranks_leave_the_gradients_of_one(name: str, tmp_path: Path) -> None:
    check(4, tmp_path, FOUR[name])
