"""Calls of transformers' layers in a step: the attention function, and arguments that layers pass
on.

Attention of a step is registered with transformers by name, without masks. Layers pass on the
microbatch in a keyword argument.

In Llama 4, layers with rotary positions attend within chunks of a rollout. Layers without them
multiply queries by a temperature that grows with the position. The model's code uses the index in
the call as position. That is wrong in microbatches, which hold several paths, so the multiplication
is done here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.attention import attend
from forkpoint.hosts.calls import CallContext, chunk_of, in_forward, refuse_call, set_chunk
from forkpoint.hosts.modules import every_module, plain_class

LLAMA4_ATTENTION = ("transformers.models.llama4.modeling_llama4", "Llama4TextAttention")
_TEMPERED = "_forkpoint_tempered"


def place_queries(decoder: nn.Module, changes: Changes) -> None:
    """Compute chunks and temperatures of Llama 4's layers from positions on paths, until the
    changes are undone. Layers of other families are not changed."""
    for _, module in every_module(decoder):
        kind, layer = plain_class(module), vars(module)
        if (kind.__module__, kind.__name__) != LLAMA4_ATTENTION:
            continue
        config = layer["config"]
        if config.layer_types[layer["layer_idx"]] == "chunked_attention":
            set_chunk(module, config.attention_chunk_size, changes)
        if layer["attn_temperature_tuning"] and not layer["use_rope"]:
            changes.set(layer, "attn_temperature_tuning", False)
            changes.set(layer, _TEMPERED, True)


def tempered(module: Any, q_BLHD: Tensor, context: CallContext) -> Tensor:
    """Queries times the temperatures of their positions, as in `Llama4TextAttention`."""
    if not getattr(module, _TEMPERED, False):
        return q_BLHD
    place_BL = context.inputs.position_ids
    scale_BL = torch.log1p(torch.floor((place_BL.float() + 1.0) / module.floor_scale))
    scale_BL = scale_BL * module.attn_scale + 1.0
    return (q_BLHD * scale_BL[:, :, None, None]).to(q_BLHD.dtype)


ATTENTION_NAME = "forkpoint"
"""Name of the attention implementation of steps in transformers."""
UNMASKED = "forkpoint without masks"
"""Name of an attention implementation for which transformers makes no masks."""
CONTEXT_ARGUMENT = "forkpoint_context"
# Other arguments that layers pass and that do not change values. Any further argument with a value
# is refused, because it may be a mask or a bias.
HARMLESS_ARGUMENTS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states"}
)


def taken_context(module: nn.Module, what: str, kwargs: dict[str, Any]) -> CallContext:
    """Take the microbatch from a layer's call arguments.

    Raises UnsupportedError if there is none, and for unknown arguments.
    """
    context = kwargs.pop(CONTEXT_ARGUMENT, None)
    if context is None:
        refuse_call()
    strange = sorted(k for k, v in kwargs.items() if v is not None and k not in HARMLESS_ARGUMENTS)
    if strange:
        raise UnsupportedError(
            f"{type(module).__name__} passes {', '.join(strange)} to {what}, whose effect is not "
            "known, so forkpoint cannot be exact. Leave it out."
        )
    return context


def forkpoint_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer of a microbatch.

    query [B, H, L, D], key [B, K, L, D], value [B, K, L, E] hold the microbatch's tokens; the
    result is [B, L, H, E].
    """
    context = taken_context(module, "its attention function", kwargs)
    if attention_mask is not None or dropout:
        found = "a mask" if attention_mask is not None else f"dropout {dropout}"
        raise UnsupportedError(
            f"{type(module).__name__} asks for {found} in attention; forkpoint knows causal "
            "attention without custom masks and without dropout. Set attention_dropout to 0 and "
            "give no attention_mask."
        )
    o_BLHE = attend(
        context,
        module,
        tempered(module, query.transpose(1, 2), context),
        key.transpose(1, 2),
        value.transpose(1, 2),
        scale=scaling,
        window=chunk_of(module) or sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return o_BLHE, None


def configurations(model: nn.Module) -> list[PreTrainedConfig]:
    """The configurations of a model's modules, each once."""
    # Not getattr, which takes ten times as long for modules without configuration.
    found = [vars(module).get("config") for _, module in every_module(model)]
    return list({id(c): c for c in found if isinstance(c, PreTrainedConfig)}.values())


class ForwardConfig:
    """A decoder's configuration during a step, with which transformers makes no masks.

    It refuses threads that do not run the step. A thread that entered the decoder before the step
    would otherwise continue without its mask.
    """

    def __init__(self, config: Any) -> None:
        vars(self)["_config"] = config

    @property
    def _attn_implementation(self) -> str:
        return UNMASKED if in_forward() else refuse_call()

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_config"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(vars(self)["_config"], name, value)


def set_attention(decoder: nn.Module, changes: Changes) -> None:
    """Set a decoder to the attention of microbatches, until the changes are undone."""
    own = vars(decoder)
    configs = configurations(decoder)
    changes.set(own, "config", ForwardConfig(own["config"]))
    for config in configs:
        changes.set(vars(config), "_attn_implementation_internal", ATTENTION_NAME)
        if vars(config).get("output_router_logits"):  # which would keep them all
            changes.set(vars(config), "output_router_logits", False)


def set_stock_attention(model: nn.Module, changes: Changes) -> None:
    """Let stock forwards run even if the user has set the model to forkpoint's attention, until the
    changes are undone."""
    for config in configurations(model):
        if config._attn_implementation == ATTENTION_NAME:
            changes.set(vars(config), "_attn_implementation_internal", "eager")


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, forkpoint_attention)
# Masks for other callers, whose configuration names forkpoint's attention.
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, refuse_call)
