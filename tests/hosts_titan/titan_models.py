"""Tiny models of torchtitan."""

from typing import Any

import torch
from torch import nn
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model

SIZES = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 61}


def moe(*, shared: int = 1) -> MoEArgs:
    return MoEArgs(num_experts=6, num_shared_experts=shared, top_k=2, use_grouped_mm=False)


def titan_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any
) -> nn.Module:
    """A random model of a family: 3 layers, 4 query and 2 key-value heads."""
    arguments: dict[str, Any] = {**SIZES, "max_seq_len": 256}
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    if family == "llama3":
        arguments |= {"multiple_of": 16, **changes}
        model: nn.Module = Transformer(TransformerModelArgs(**arguments))
    elif family == "deepseek_v3":
        sizes = {n: SIZES[n] for n in ("dim", "n_layers", "n_heads", "vocab_size")}
        sizes |= {"inter_dim": 48, "moe_inter_dim": 16, "kv_lora_rank": 12, "max_seq_len": 256}
        heads = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
        args = DeepSeekV3ModelArgs(**{**sizes, **heads, "moe_args": moe(), **changes})
        args.moe_impl = "standard"
        model = DeepSeekV3Model(args)
    else:
        if family == "qwen3_moe":
            arguments |= {"moe_enabled": True, "moe_inter_dim": 16, "moe_args": moe(shared=0)}
        arguments |= {"head_dim": 8, "hidden_dim": 48, **changes}
        model = Qwen3Model(Qwen3ModelArgs(**arguments))
    with torch.no_grad():
        for parameter in model.parameters():
            # The usual initialisation is so small that attention is uniform and norms are all one.
            noise = torch.randn(parameter.shape) * 0.3
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    torch.set_rng_state(state)
    for parameter in model.parameters():  # rotary embeddings stay as they are
        parameter.data = parameter.data.to(dtype)
    return model
