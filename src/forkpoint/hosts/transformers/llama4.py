"""Attention of Llama 4: chunks, and temperatures by place.

Layers with rotary positions see their own chunk of a rollout alone. Layers without multiply queries
by a temperature that grows with the place. The model's code takes the place within the call for it,
and the microbatches of a step hold several paths, so that steps multiply by themselves.
"""

from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.hosts.calls import CallContext, set_chunk
from forkpoint.hosts.modules import every_module, plain_class

ATTENTION = ("transformers.models.llama4.modeling_llama4", "Llama4TextAttention")
_TEMPERED = "_forkpoint_tempered"


def place_queries(decoder: nn.Module, changes: Changes) -> None:
    """Compute chunks and temperatures of Llama 4's layers from places on paths, until the changes
    are undone. Other families' layers are not changed."""
    for _, module in every_module(decoder):
        kind, layer = plain_class(module), vars(module)
        if (kind.__module__, kind.__name__) != ATTENTION:
            continue
        config = layer["config"]
        if config.layer_types[layer["layer_idx"]] == "chunked_attention":
            set_chunk(module, config.attention_chunk_size, changes)
        if layer["attn_temperature_tuning"] and not layer["use_rope"]:
            changes.set(layer, "attn_temperature_tuning", False)
            changes.set(layer, _TEMPERED, True)


def tempered(module: Any, q_BLHD: Tensor, context: CallContext) -> Tensor:
    """Queries times the temperatures of their places, as `Llama4TextAttention` computes them."""
    if not getattr(module, _TEMPERED, False):
        return q_BLHD
    place_BL = context.inputs.position_ids
    scale_BL = torch.log1p(torch.floor((place_BL.float() + 1.0) / module.floor_scale))
    scale_BL = scale_BL * module.attn_scale + 1.0
    return (q_BLHD * scale_BL[:, :, None, None]).to(q_BLHD.dtype)
