"""Tiny models of torchtitan 0.3."""

from typing import Any

from torch import nn
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

DIM, VOCABULARY, LAYERS = 32, 61, 3
DRAWN = {"weight": nn.init.normal_, "bias": nn.init.zeros_}
ONES = {"weight": nn.init.ones_}
FLEX, HEAD = {"inner": FlexAttention.Config()}, "lm_head"


def build(
    family: str,
    *,
    n_kv_heads: int | None = 2,
    qk_norm: bool = True,
    enable_weight_tying: bool = False,
    max_seq_len: int = 256,
    fuse_qkv: bool = True,
    inner: Any = None,
    sequence_parallel: bool = True,
) -> nn.Module:
    """inner: the configuration of the inner attention."""
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
                feed_forward=make_ffn_config(
                    dim=DIM, hidden_dim=48, w1_param_init=DRAWN, w2w3_param_init=DRAWN
                ),
            )
        )
    model = Llama3Model if llama else Qwen3Model
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
        set_qwen3_sharding_config(config, enable_sp=sequence_parallel, enable_ep=False)
    return config.build()
