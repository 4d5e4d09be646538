"""Attention of one layer in a microbatch, for models of any library."""

import torch
from torch import Tensor, nn

from forkpoint.engine.prefix_cache import capture_prefix
from forkpoint.hosts.calls import CallContext, has_chunks
from forkpoint.hosts.compiled_attention import layer_attention, numbered
from forkpoint.hosts.compiled_context import context_attention
from forkpoint.hosts.early_exit import EarlyExit
from forkpoint.hosts.torch_dist.context_parallel import repeated
from forkpoint.ops.attention import shared_attention


def attend(
    context: CallContext,
    layer: nn.Module,
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKE: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a microbatch over itself and its prefix cache: [B, L, H, E].

    Keys and values of the tokens that later microbatches read are captured.

    Args:
        layer: the attention module, which is the key of the prefix cache.
        scale: factor of the scores; by default D ** -0.5.
        window: number of tokens that a token attends to, itself included; 0 is no limit. In layers
            with chunks (`set_chunk`), the length of a chunk.
        softcap: bound of the scores, by tanh; 0 is no bound.
        sinks: [H], one score for each head. It enters the softmax and has no value.

    In compiled code this is one operator (hosts/compiled_attention.py).

    Raises EarlyExit if the forward of the microbatch ends in this layer.
    """
    batch, length, _, dim = q_BLHD.shape
    factor = dim**-0.5 if scale is None else scale
    q_THD, k_TKD, v_TKE = (x.flatten(0, 1) for x in _autocast(q_BLHD, k_BLKD, v_BLKE))
    if torch.compiler.is_compiling():
        index, ranks = numbered(layer)
        if ranks == 1:
            o_THE, *_ = layer_attention(q_THD, k_TKD, v_TKE, sinks, index, factor, softcap, window)
        else:
            k_TKD, v_TKE = repeated(k_TKD, ranks, 1), repeated(v_TKE, ranks, 1)
            o_THE, *_ = context_attention(
                q_THD, k_TKD, v_TKE, sinks, index, factor, softcap, window, ranks
            )
        return o_THE.view(batch, length, *o_THE.shape[1:])
    places, tokens = context.places, context.inputs.part.tokens
    ends = layer in context.ends_in
    if ends:
        k_TKD, v_TKE = places.to_heads((k_TKD, v_TKE), tokens)
    else:
        q_THD, k_TKD, v_TKE = places.to_heads((q_THD, k_TKD, v_TKE), tokens)
    k_TKD = capture_prefix(k_TKD, (layer, "k"), context.state.capture)
    v_TKE = capture_prefix(v_TKE, (layer, "v"), context.state.capture)
    if ends:
        raise EarlyExit((k_TKD, v_TKE))
    o_THE, _ = shared_attention(
        q_THD,
        k_TKD,
        v_TKE,
        table=context.state.table(window, q_BLHD.device, chunked=has_chunks(layer)),
        cache=context.state.ancestors(layer),
        sinks=None if sinks is None else places.own_heads(sinks),
        scale=factor,
        softcap=softcap,
        window=window,
        kernel=context.config.attention_kernel,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    o_THE = places.to_places(o_THE, tokens)
    return o_THE.view(batch, length, *o_THE.shape[1:])


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """As torch's own attention does, which is among the operations that autocast casts."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(kind)) for x in tensors]
