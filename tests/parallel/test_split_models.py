"""Models that transformers splits over ranks leave the gradients of one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cases_of_ranks import MOE, Case, check, named, through_function
from peft import LoraConfig, get_peft_model
from scenarios_of_ranks import DEEP, EMPTY, HOSTED, UNEQUAL, OfAllRanks, routed, through_logprobs
from test_ranks import checkpointed, frozen_but, valued
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import forkpoint
from forkpoint import RolloutBatch
from forkpoint.losses import GSPO, ValueLoss


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


def after_stock_backward(policy: forkpoint.Policy, batch: RolloutBatch, loss: Any) -> float:
    """The model's own backward gives replicated parameters hooks, which stay."""
    model: Any = policy.host.model
    for _ in range(2):  # the second one has the hooks of the first
        model.zero_grad()
        ids = torch.arange(9)[None]
        model(input_ids=ids, labels=ids).loss.backward()
    return policy.forward_backward(batch, loss).loss


def tensor(**changes: Any) -> Case:
    return Case(options={"tp_size": 2}, **changes)


def tensor_and_data(*, ranks: str = "fsdp_size", ep: int = 1, **changes: Any) -> Case:
    """Of a mixture of experts, where there is a number of ranks of experts."""
    given: dict[str, Any] = {"rollouts": UNEQUAL, **changes}
    options = {"tp_size": 2, ranks: 2}
    if ep > 1:
        options, given = {**options, "ep_size": ep}, {**EXPERTS, **given}
    return Case(options=options, **given)


EXPERTS: dict[str, Any] = {"family": "qwen3_moe", "sizes": MOE}
FSDP2_EP2 = {"fsdp_size": 2, "ep_size": 2}
# Families are those of tests/numerics/test_families_split.py.
CASES: dict[str, Case] = {
    "tensor": tensor(),
    "tensor, two passes": tensor(loss=GSPO()),
    "tensor, checkpointed": tensor(alone=checkpointed),
    "tensor, recomputed": tensor(config=replace(DEEP, activations="recompute")),
    "tensor, hosted": tensor(config=HOSTED, loss=GSPO()),
    "tensor, wide sums": tensor(config=replace(DEEP, grad_accumulation_dtype="float32"), steps=2),
    "tensor, a critic": tensor(critic=True, loss=ValueLoss(), rollouts=(valued(UNEQUAL[0]),)),
    "tensor, LoRA": tensor(around=adapted),
    "tensor, last layer alone": tensor(alone=frozen_but(-1)),
    "tensor, first layer alone": tensor(alone=frozen_but(0)),
    "tensor, log-probs": tensor(step=through_logprobs),
    "tensor, a function": tensor(step=through_function),
    "tensor, stock backward before": tensor(step=after_stock_backward),
    "tensor and expert": Case(options={"tp_size": 2, "ep_size": 2}, **EXPERTS),
    "data and expert": Case(options=FSDP2_EP2, **EXPERTS, rollouts=UNEQUAL),
    "data and expert, replayed": Case(
        options=FSDP2_EP2, **EXPERTS, rollouts=tuple(map(routed, UNEQUAL)), loss=GSPO()
    ),
    "tensor x data": tensor_and_data(),
    "tensor x data, tied": tensor_and_data(sizes={"tie_word_embeddings": True}),
    "tensor x data, accumulated": tensor_and_data(steps=3),
    "tensor x data, coupled": tensor_and_data(loss=OfAllRanks()),
    "tensor x replicas": tensor_and_data(ranks="dp_replicate_size"),
    "tensor x data x expert": tensor_and_data(ep=4),
    "tensor x data, expert 2": tensor_and_data(ep=2),
    "experts, a data rank without rollouts": tensor_and_data(ep=4, rollouts=EMPTY),
}


@named(CASES, "tensor and expert")
def test_ranks_leave_the_gradients_of_one_process(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path)
