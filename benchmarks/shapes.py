"""Models of published shapes with random weights, and groups of rollouts of given lengths."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from forkpoint.plan.models import MODELS
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.rollouts.traces import load_rollouts

QWEN3 = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b")
# Public configurations: what decides sizes, and nothing else.
SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {"model_type": "llama", **MODELS["llama3-8b"]},
    **{name: {"model_type": "qwen3", **MODELS[name]} for name in QWEN3},
    # Layers of gated linear attention, and every fourth of full attention.
    "qwen3.5-4b": {
        "model_type": "qwen3_5_text",
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
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        **MODELS["qwen3-30b-a3b"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
}
TINY_SIZES: dict[str, int] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
VISION_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-vl-4b": {"depth": 24, "hidden_size": 1024, "deepstack_visual_indexes": [5, 11, 17]}
    | {"intermediate_size": 4096},
    "qwen3-vl-8b": {"depth": 27, "hidden_size": 1152, "deepstack_visual_indexes": [8, 16, 24]}
    | {"intermediate_size": 4304},
}
"""Encoders of Qwen3-VL, whose language models have the sizes of Qwen3."""
TINY_VISION = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
POSITIONS = 1 << 20
TITAN_POSITIONS = 65_536
"""torchtitan computes rotary embeddings of all positions beforehand."""
SCALE_TINY = 64
"""Divisor of lengths with a tiny model."""


def sizes_of(shape: str, *, tiny: bool = False, layers: int | None = None) -> dict[str, Any]:
    """The configuration of a shape, of a tiny model of the same kind, or with fewer layers."""
    sizes: dict[str, Any] = {"tie_word_embeddings": False, **SHAPES[shape]}
    sizes["max_position_embeddings"] = POSITIONS
    if tiny:
        sizes |= {name: size for name, size in TINY_SIZES.items() if name in sizes}
    return sizes if layers is None else sizes | {"num_hidden_layers": layers}


def make_model(
    shape: str,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
    tiny: bool = False,
    **sizes: Any,
) -> PreTrainedModel:
    """A model of that shape in training mode, its random weights made on the device."""
    config = AutoConfig.for_model(**(sizes_of(shape, tiny=tiny, layers=layers) | sizes))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.train()


def make_titan_model(
    shape: str,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
    tiny: bool = False,
) -> nn.Module:
    """torchtitan's Llama 3 in training mode, its random weights made on the device."""
    llama = import_module("torchtitan.models.llama3.model.args")
    model = import_module("torchtitan.models.llama3.model.model")
    sizes = sizes_of(shape, tiny=tiny, layers=layers)
    args = llama.TransformerModelArgs(
        dim=sizes["hidden_size"],
        n_layers=sizes["num_hidden_layers"],
        n_heads=sizes["num_attention_heads"],
        n_kv_heads=sizes["num_key_value_heads"],
        vocab_size=sizes["vocab_size"],
        ffn_dim_multiplier=1.3,
        multiple_of=32 if tiny else 1024,
        rope_theta=sizes.get("rope_theta", 500_000),
        max_seq_len=TITAN_POSITIONS,
    )
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        made = model.Transformer(args)
        made.init_weights()
    # Parameters alone: rotary embeddings are a complex buffer.
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype)
    return made.train()


def make_vision_model(
    shape: str,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
    tiny: bool = False,
) -> PreTrainedModel:
    """A model of a shape of VISION_SHAPES in training mode, its random weights made on the device.

    layers: of the language model and of the encoder, whose first block then gives the features
        for deeper layers.
    """
    sizes = sizes_of(shape.replace("-vl", ""), tiny=tiny, layers=layers)
    half = sizes["head_dim"] // 2
    # Sections of time, height and width, as 24, 20 and 20 of 64.
    side = half * 5 // 16
    rope = {**MROPE, "mrope_section": [half - 2 * side, side, side]}
    vision: dict[str, Any] = {"num_heads": 16, "spatial_merge_size": 2, **VISION_SHAPES[shape]}
    vision |= {"out_hidden_size": sizes["hidden_size"], "num_position_embeddings": 2304}
    if tiny:
        vision |= {**TINY_VISION, "deepstack_visual_indexes": [1]}
    if layers is not None:
        vision |= {"depth": layers, "deepstack_visual_indexes": [0]}
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config={**sizes, "model_type": "qwen3_vl_text", "rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=sizes["tie_word_embeddings"],
        image_token_id=sizes["vocab_size"] - 1,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    return model.train()


def checkpoint(model: nn.Module) -> None:
    """Let the model's blocks keep only their inputs, as transformers has it."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable: Any = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})


def read_rollouts(file: Path, *, vocab: int, tiny: bool, **options: Any) -> list[Rollout]:
    """Rollouts of a file. With a tiny model, token ids are folded into its vocabulary.

    options: arguments of `load_rollouts`.
    """
    rollouts = load_rollouts(file, **options)
    return [replace(r, token_ids=r.token_ids % vocab) for r in rollouts] if tiny else rollouts


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
