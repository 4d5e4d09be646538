"""Tiny models of torchtitan."""

from typing import Any

import torch
from torch import nn
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model

SIZES = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 61}


def titan_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any
) -> nn.Module:
    """A random model of a family (llama3, qwen3): 3 layers, 4 query and 2 key-value heads."""
    arguments: dict[str, Any] = {**SIZES, "max_seq_len": 256}
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    if family == "llama3":
        arguments |= {"multiple_of": 16, **changes}
        model: nn.Module = Transformer(TransformerModelArgs(**arguments))
    else:
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
