"""Models of published shapes with random weights, and groups of rollouts of given lengths."""

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from forkpoint.rollouts.batch import Rollout, RolloutBatch

# Layers of gated linear attention, and every fourth of full attention.
QWEN35_4B: dict[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
}
# Public configurations: what decides sizes, and nothing else.
SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3.5-4b": {"model_type": "qwen3_5_text", **QWEN35_4B},
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "tiny-moe": {
        "model_type": "qwen3_moe",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
}
POSITIONS = 1 << 20
SCALE_TINY = 64
"""Divisor of lengths with the tiny model."""


def make_model(
    shape: str,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
) -> PreTrainedModel:
    """A model of that shape in training mode, its random weights made on the device."""
    sizes = {**SHAPES[shape], "max_position_embeddings": POSITIONS}
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), dtype=dtype)
    return model.train()


def checkpoint(model: nn.Module) -> None:
    """Let the model's blocks keep only their inputs, as transformers has it."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable: Any = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})


def make_group(
    prompt: int, responses: list[int], *, vocab: int, seed: int = 0, group: str = "g"
) -> RolloutBatch:
    """One prompt with responses of those lengths, random tokens; responses alone are trained."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab, prompt)
    # First tokens differ, so that responses share none.
    firsts = rng.permutation(vocab)[: len(responses)]
    return RolloutBatch(
        Rollout(
            np.concatenate([shared, firsts[n : n + 1], rng.integers(0, vocab, length - 1)]),
            np.repeat([0, 1], [prompt, length]),
            float(rng.normal()),
            group_id=group,
        )
        for n, length in enumerate(responses)
    )
