"""Tiny models of torchtitan 0.3."""

from typing import Any

from torch import nn
from torchtitan.components.optimizer import default_adamw, register_moe_load_balancing_hook
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, build_mla_moe_layers
from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

DIM, VOCABULARY, LAYERS = 32, 61, 3
DRAWN = dict.fromkeys(("weight", "w1_EFD", "w2_EDF", "w3_EFD"), nn.init.normal_)
ONES = {"weight": nn.init.ones_}
FLEX, HEAD = {"inner": FlexAttention.Config()}, "lm_head"
EXPERTS = {"num_experts": 6, "top_k": 2}
BIAS = "expert_bias_E"
"""The buffer of a mixture that balances its experts."""


def checkpoint_fully(model: nn.Module) -> None:
    """Let all blocks run again in backwards."""
    FullAC.Config().build().apply(model)


def balancing_optimizer(model: nn.Module, dims: ParallelDims) -> Any:
    """torchtitan's optimizer, which moves weights by nothing and balances experts."""
    settings = default_adamw(lr=0.0)
    settings.implementation = "for-loop"
    optimizers = settings.build(model_parts=[model])
    register_moe_load_balancing_hook(optimizers, [model], dims)
    return optimizers


def moe() -> Any:
    """The configuration of a mixture of experts."""
    return make_moe_config(
        num_experts=EXPERTS["num_experts"],
        router=make_router_config(dim=DIM, gate_param_init=DRAWN, **EXPERTS),
        routed_experts=make_routed_experts_config(
            dim=DIM, hidden_dim=16, param_init=DRAWN, comm_backend="standard", **EXPERTS
        ),
    )


def latent_layers(groups: int | None) -> list[Any]:
    """Configurations of DeepSeek-V3's layers: a dense one, then mixtures of experts."""
    return build_mla_moe_layers(
        n_layers=LAYERS,
        n_dense_layers=1,
        dim=DIM,
        n_heads=4,
        q_lora_rank=0,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        mscale=1.0,
        dense_hidden_dim=48,
        moe_hidden_dim=16,
        num_experts=EXPERTS["num_experts"],
        num_shared_experts=1,
        router_top_k=EXPERTS["top_k"],
        router_score_func="sigmoid",
        router_num_expert_groups=groups,
        router_num_limited_groups=None if groups is None else 1,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        linear_init=DRAWN,
        norm_init=ONES,
        depth_init=lambda _: DRAWN,
        depth_experts_init=lambda _: DRAWN,
        rope=ComplexRoPE.Config(dim=4, max_seq_len=256, theta=10_000.0),
    )


def configuration(
    family: str,
    *,
    n_kv_heads: int | None = 2,
    qk_norm: bool = True,
    enable_weight_tying: bool = False,
    max_seq_len: int = 256,
    fuse_qkv: bool = True,
    inner: Any = None,
    sequence_parallel: bool = True,
    expert_parallel: bool = False,
    groups: int | None = None,
) -> Any:
    """The configuration of a model.

    inner: that of its inner attention. groups: of experts, of "deepseek_v3".
    """
    llama = family == "llama3"
    rope = ComplexRoPE if llama else CosSinRoPE
    attention: dict[str, Any] = {"dim": DIM, "n_heads": 4, "n_kv_heads": n_kv_heads, "head_dim": 8}
    if llama:
        attention["head_dim"] = None
    elif qk_norm:
        attention["qk_norm"] = RMSNorm.Config(normalized_shape=8, param_init=ONES)
    layers = []
    for _ in range(LAYERS):
        block = Llama3TransformerBlock if llama else Qwen3TransformerBlock
        layers.append(
            block.Config(
                attention_norm=RMSNorm.Config(normalized_shape=DIM, param_init=ONES),
                ffn_norm=RMSNorm.Config(normalized_shape=DIM, param_init=ONES),
                attention=make_gqa_config(
                    wqkv_param_init=DRAWN,
                    wo_param_init=DRAWN,
                    inner_attention=inner or ScaledDotProductAttention.Config(),
                    rope=rope.Config(dim=8, max_seq_len=max_seq_len, theta=10_000.0),
                    fuse_qkv=fuse_qkv,
                    **attention,
                ),
                feed_forward=None
                if family == "qwen3_moe"
                else make_ffn_config(
                    dim=DIM, hidden_dim=48, w1_param_init=DRAWN, w2w3_param_init=DRAWN
                ),
                moe=moe() if family == "qwen3_moe" else None,
            )
        )
    model = Llama3Model if llama else Qwen3Model
    if family == "deepseek_v3":
        model, layers = DeepSeekV3Model, latent_layers(groups)
        for layer in layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = model.Config(
        dim=DIM,
        vocab_size=VOCABULARY,
        enable_weight_tying=enable_weight_tying,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=DRAWN
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=ONES),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCABULARY, param_init=DRAWN),
        layers=layers,
    )
    if llama:
        set_llama3_sharding_config(config, enable_sp=sequence_parallel)
    else:
        deepseek = family == "deepseek_v3"
        shard = set_deepseek_v3_sharding_config if deepseek else set_qwen3_sharding_config
        shard(config, enable_sp=sequence_parallel, enable_ep=expert_parallel)
    return config


def build(family: str, **changes: Any) -> nn.Module:
    return configuration(family, **changes).build()
