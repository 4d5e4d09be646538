"""Tiny models of the cases of scripts/compare_commits.py, as numbers and texts."""

from dataclasses import dataclass, field
from itertools import product
from typing import Any


@dataclass(frozen=True)
class Model:
    """A tiny random model in float64.

    sizes: changes of its configuration. kinds: its layers' kinds, of a hybrid ("state" or
        "attention"). learns: parts of the names of the parameters that learn; without, all do.
        adapters: arguments of a LoRA configuration.
    """

    name: str
    family: str
    sizes: dict[str, Any] = field(default_factory=dict, hash=False)
    window: int | None = None
    sinks: bool = False
    checkpointed: bool = False
    critic: bool = False
    plain_attention: bool = False
    kinds: tuple[str, ...] = ()
    learns: tuple[str, ...] = ()
    adapters: dict[str, Any] | None = field(default=None, hash=False)


WINDOW = 7
MOE = {"num_experts_per_tok": 2}
SHARED_EXPERT = {
    **MOE,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 12,
}
GROUPED = {**MOE, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 24,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "qwen3": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "qwen2": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "mistral": {"sliding_window": WINDOW},
    "ministral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "olmo3": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW, "pad_token_id": 0},
    "exaone4": {"sliding_window": WINDOW},
    "smollm3": {"pad_token_id": 0},
    "glm": {"pad_token_id": 0},
    "glm4": {"pad_token_id": 0},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "granitemoe": {**MOE, "num_local_experts": 4, "logits_scaling": 2.0},
    "gpt_oss": {**MOE, "sliding_window": WINDOW, "num_local_experts": 4},
    "qwen3_moe": {**MOE, "num_experts": 4, "moe_intermediate_size": 16},
    "mixtral": {**MOE, "num_local_experts": 4},
    "glm4_moe": {**GROUPED, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **GROUPED,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 4,
        "num_key_value_heads": 4,
    },
    "qwen3_next": {**DELTA, **SHARED_EXPERT},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **SHARED_EXPERT},
    "granitemoehybrid": {
        **MOE,
        **MAMBA,
        "num_local_experts": 4,
        "position_embedding_type": "rope",
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
    },
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "helium": {"pad_token_id": 0},
}
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "mistral",
    "ministral",
    "mixtral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "olmo",
    "olmo2",
    "olmo3",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "phi",
    "phi3",
    "smollm3",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "cohere",
    "deepseek_v3",
    "exaone4",
    "hunyuan_v1_dense",
    "arcee",
    "helium",
    "seed_oss",
    "starcoder2",
)
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid")
STATES = ("state", "attention", "state")
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "queries": {"target_modules": ["q_proj"]},
    "last layer": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [2]},
    "last mlp": {"target_modules": ["down_proj"], "layers_to_transform": [2]},
    "first layer": {"target_modules": ["v_proj"], "layers_to_transform": [0]},
    "embeddings": {"target_modules": ["embed_tokens", "v_proj"]},
    "trained embeddings": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
    "dora": {"use_dora": True},
    "bias": {"bias": "all", "lora_bias": True},
}


def plain_models() -> list[Model]:
    """Llama and Qwen3 with windows and sinks, without and with checkpoints of their own."""
    found = []
    for checkpointed, family, window, sinks in product(
        (False, True), ("llama", "qwen3"), (None, WINDOW), (False, True)
    ):
        marks = {"window": window, "sinks": sinks, "checkpointed": checkpointed}
        name = " ".join([family, *(mark for mark, on in marks.items() if on)])
        sizes = {"num_hidden_layers": 2}
        found.append(Model(name, family, sizes, window, sinks, checkpointed))
    return found


def hybrid(family: str, kinds: tuple[str, ...] = STATES, **sizes: Any) -> Model:
    own = {**DELTA, **(SHARED_EXPERT if family != "qwen3_5_text" else {})}
    if family == "granitemoehybrid":
        own = {**MAMBA, "num_local_experts": 0}
    name = f"{family} {' '.join(kinds)}" if kinds != STATES else family
    return Model(name, family, {**own, "num_hidden_layers": len(kinds), **sizes}, kinds=kinds)
