"""Mixtures of experts of every family that has them, and what their experts were given."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from forkpoint import Rollout, RolloutBatch, wrap
from forkpoint.engine.changes import Changes
from forkpoint.engine.host import FoundRouter
from forkpoint.engine.route_replay import ForcedRoutes, Routes
from forkpoint.hosts.routers import force_routers, routers_of_copy

TWO_OF_EIGHT = {"num_experts_per_tok": 2, "num_local_experts": 8}
SMALL = {"num_experts_per_tok": 2, "num_experts": 8, "moe_intermediate_size": 32}
# Experts in two groups of which one is chosen first; the first layer has none.
GROUPED = {
    **SMALL,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {**TWO_OF_EIGHT, "sliding_window": 32},
    "qwen3_moe": SMALL,
    "mixtral": TWO_OF_EIGHT,
    "granitemoe": {**TWO_OF_EIGHT, "logits_scaling": 2.0},
    "glm4_moe": GROUPED,
    "deepseek_v3": {
        **GROUPED,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 8,
        "num_key_value_heads": 4,
    },
    "qwen3_next": {**SMALL, **DELTA},
    "qwen3_5_moe_text": {**SMALL, **DELTA},
    "granitemoehybrid": {
        **TWO_OF_EIGHT,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 32,
        "shared_intermediate_size": 64,
        "position_embedding_type": "rope",
        "logits_scaling": 2.0,
    },
}


def expert_model(
    family: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int = 1,
    eager: bool = True,
    **changes: Any,
) -> PreTrainedModel:
    """Two layers of width 64 as the family initialises them, 2 of 8 experts a token.

    eager: whether experts run one by one; transformers' default, a grouped matrix product, has no
        float64.
    """
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **FAMILIES[family],
    }
    if family == "granitemoehybrid":
        # Kinds of layers have other names in older versions; those without a choice carry a state.
        carries = CONFIG_MAPPING[family]().layers_block_type[0]
        attends = {"mamba": "attention"}.get(carries, "full_attention")
        sizes["layer_types"] = [carries, attends]
    torch.manual_seed(seed)
    with warnings.catch_warnings():  # token ids of special tokens beyond the small vocabulary
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(family, **{**sizes, **changes})
        model = AutoModelForCausalLM.from_config(config)
    if eager:
        model.set_experts_implementation("eager")
    return model.to(dtype)


def expert_batch(
    *, vocab: int = 256, prompt: int = 100, response: tuple[int, int] = (20, 60)
) -> RolloutBatch:
    """Two groups of six; `response`: the least and the most tokens of one."""
    rng = np.random.default_rng(1)
    rollouts = []
    for group in range(2):
        shared = rng.integers(0, vocab, prompt).tolist()
        for advantage in rng.normal(size=6).tolist():
            own = rng.integers(0, vocab, int(rng.integers(response[0], response[1] + 1))).tolist()
            mask = [0] * prompt + [1] * len(own)
            rollouts.append(Rollout(shared + own, mask, advantage, group_id=group))
    return RolloutBatch(rollouts)


@contextmanager
def chosen_experts(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Within it, what routers return as indices: (name of the router, int64 [tokens, 2]) a call.

    Of routers whose forward returns them, as those of newer versions of transformers do.
    """
    found: list[tuple[str, Tensor]] = []
    hooks = []
    for name, module in model.named_modules():

        def note(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if isinstance(output, tuple) and not output[-1].is_floating_point():
                found.append((name, output[-1].detach().clone()))

        if "Router" in type(module).__name__:
            hooks.append(module.register_forward_hook(note))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def found_routers(model: nn.Module) -> list[FoundRouter]:
    return wrap(model).host.routers.found


@contextmanager
def forced(
    model: nn.Module, routers: list[FoundRouter], routes: Routes, *, record: bool = False
) -> Iterator[ForcedRoutes]:
    """Within it the stock model is forced to the routes, or records them."""
    with Changes() as changes:
        run = ForcedRoutes(routes, len(routers), torch.device("cpu"), record=record)
        force_routers(routers_of_copy(routers, model), run.choose, changes)
        yield run
