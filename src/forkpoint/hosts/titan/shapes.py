"""Sizes of torchtitan's models, by which plans are priced."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from forkpoint.hosts.modules import plain_class
from forkpoint.plan.pricing.cost import ModelShape

VOCABULARY = 1024
"""Of a model of few layers."""


def model_shape(model: Any, blocks: list[Any], *, checkpointed: bool) -> ModelShape:
    """The shape of a model."""
    args = model.model_args
    kv_heads = getattr(args, "n_kv_heads", None)
    sizes = {
        "num_hidden_layers": len(blocks),
        "hidden_size": args.dim,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": kv_heads or args.n_heads,
        "head_dim": getattr(args, "head_dim", args.dim // args.n_heads),
        "vocab_size": args.vocab_size,
        "intermediate_size": blocks[0].feed_forward.w1.weight.shape[0],
    }
    return ModelShape.from_config(
        sizes,
        dtype_bytes=model.tok_embeddings.weight.element_size(),
        checkpointed=checkpointed,
    )


def shallow_model(
    model: Any, layers: int, *, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """A model of few such layers and few tokens, of random weights, in training mode.

    Random number generators end as they were.
    """
    args = deepcopy(model.model_args)  # with attributes that are no fields of it
    args.n_layers, args.vocab_size = layers, VOCABULARY
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), torch.device(device):
        shallow = plain_class(model)(args)
        shallow.init_weights(buffer_device=device)
    for parameter in shallow.parameters():  # not the rotary embeddings
        parameter.data = parameter.data.to(dtype)
    return shallow.train()
