"""Sizes of torchtitan's models, by which plans are priced."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from forkpoint.hosts.shapes import divided
from forkpoint.hosts.titan.families import blocks_of, family_of, sizes_of
from forkpoint.hosts.titan.splits import Split
from forkpoint.plan.pricing.cost import ModelShape

VOCABULARY = 1024
"""Of a model of few layers."""


def first_mixture(args: Any) -> int:
    """The number of the first layer that is a mixture of experts; that of layers if none is."""
    mixtures = getattr(args, "moe_enabled", False)
    return getattr(args, "n_dense_layers", 0 if mixtures else args.n_layers)


def model_shape(model: Any, splits: Sequence[Split], *, checkpointed: bool) -> ModelShape:
    """The shape of the part of a model that this rank computes.

    Raises UnsupportedError where a rank would have parts of heads.
    """
    args, blocks = sizes_of(model), blocks_of(model)
    kv_heads = getattr(args, "n_kv_heads", None)
    sizes: dict[str, Any] = {
        "num_hidden_layers": args.n_layers,
        "hidden_size": args.dim,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": kv_heads or args.n_heads,
        "head_dim": getattr(args, "head_dim", args.dim // args.n_heads),
        "vocab_size": args.vocab_size,
    }
    # Of a stage of a pipeline these are some.
    dense: list[Any] = [block for block in blocks if "feed_forward" in block._modules]
    first = first_mixture(args)
    if first:
        held = dense[0].feed_forward.w1.weight.shape[0] if dense else args.inter_dim
        sizes["intermediate_size"] = held
    if first < args.n_layers:
        experts, width = args.moe_args, args.moe_inter_dim
        sizes |= {
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.top_k,
            "n_shared_experts": experts.num_shared_experts,
            "moe_intermediate_size": width,
            "first_k_dense_replace": first,
        }
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
        if hasattr(args, name):
            sizes[name] = getattr(args, name) or None
    if hasattr(args, "v_head_dim"):
        sizes["v_head_dim"] = args.v_head_dim
    shape = ModelShape.from_config(
        sizes, dtype_bytes=next(model.parameters()).element_size(), checkpointed=checkpointed
    )
    tensor = next((style.tensor for _, _, style in splits if style.tensor is not None), None)
    if tensor is None:
        return shape
    remedy = "Choose a tensor_parallel_degree that divides both numbers of heads."
    return divided(shape, tensor.size(), remedy)


def shallow_model(
    model: Any, layers: int, *, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """A model of few such layers and few tokens, of random weights, in training mode.

    Random number generators end as they were.
    """
    version = family_of(model).version
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), torch.device(device):
        shallow = version.build(model, layers, VOCABULARY)
        version.initialize(shallow, device)
    for parameter in shallow.parameters():  # not the rotary embeddings
        parameter.data = parameter.data.to(dtype)
    return shallow.train()
