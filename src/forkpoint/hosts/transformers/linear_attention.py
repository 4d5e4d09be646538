"""Recurrent layers of transformers, run over the segments of a microbatch.

While microbatches run, one of these functions replaces the forward of each such module. It uses the
module's own projections, convolution weights, gates and norm. It replaces only the stock
recurrence, which has no segments.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.calls import CallContext
from forkpoint.hosts.compiled_attention import exchanged_once
from forkpoint.hosts.early_exit import EarlyExit
from forkpoint.hosts.modules import every_module, plain_class
from forkpoint.hosts.transformers.calls import taken_context
from forkpoint.ops.delta_rule import gated_delta_rule
from forkpoint.ops.delta_rule.kernel import decay_gate
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.ops.recurrence import gathered_inputs, short_convolution
from forkpoint.ops.selective_scan import selective_scan
from forkpoint.parallel.topology import Places


def gated_delta_net(
    module: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Forward of Gated DeltaNet of Qwen3-Next and Qwen3.5 for the hidden states of a microbatch."""
    context = _microbatch_of(module, cache_params, attention_mask, kwargs)
    hidden_BLC = hidden_states
    mixed_TC, z_TGE, b_TG, a_TG = (x.flatten(0, 1) for x in _projected(module, hidden_BLC))
    # Under autocast this is the dtype of the products, not of hidden states: kernels take 16 bits.
    kind = mixed_TC.dtype
    places = context.places
    if not places.whole:
        parts = _delta_parts(module)
        mixed_TC, b_TG, a_TG = _to_heads(context, parts, mixed_TC, b_TG, a_TG)
    # Called here and not in a helper, because a caller of it would be compiled separately.
    mixed_TC, windows_FWC, index_F = _gathered(module, mixed_TC, context)
    # Weights and sizes are read after this call. Otherwise they would be inputs of dynamic size for
    # the next compiled graph, whose kernels would take up to five times as long.
    weight_CW, bias_C = module.conv1d.weight.squeeze(1), module.conv1d.bias
    log_rate_G, gate_bias_G = module.A_log, module.dt_bias
    sizes = [module.key_dim, module.key_dim, module.value_dim]
    if not places.whole:
        weight_CW, bias_C, sizes = _own_convolution(places, _delta_parts(module), weight_CW, bias_C)
        log_rate_G, gate_bias_G = places.own_heads(log_rate_G), places.own_heads(gate_bias_G)
    mixed_TC = short_convolution(mixed_TC, weight_CW, bias_C, windows_FWC, index_F)
    mixed_TC = F.silu(mixed_TC).to(kind)
    # Kernels need separate tensors, and compiled code writes them directly.
    q, k, v = (x.contiguous() for x in mixed_TC.split(sizes, -1))
    dtype = accumulate_dtype(v.dtype)
    o_TGE = _delta_rule(
        module,
        context,
        q.unflatten(-1, (-1, module.head_k_dim)),
        k.unflatten(-1, (-1, module.head_k_dim)),
        v.unflatten(-1, (-1, module.head_v_dim)),
        decay_gate(a_TG.to(dtype), log_rate_G.to(dtype), gate_bias_G.to(dtype)),
        b_TG.sigmoid(),
    )
    if not places.whole:
        o_TGE = _to_places(context, o_TGE)
    dim = module.head_v_dim
    o_BLC = module.norm(o_TGE.reshape(-1, dim), z_TGE.reshape(-1, dim))
    return module.out_proj(o_BLC.reshape(*hidden_BLC.shape[:2], -1))


def _projected(module: Any, hidden_BLC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the convolution, of the output's gate, of beta, and of the decay."""
    batch, length, _ = hidden_BLC.shape
    if plain_class(module).__name__ == "Qwen3NextGatedDeltaNet":
        q, k, v, z, b, a = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(hidden_BLC), module.in_proj_ba(hidden_BLC)
        )
        return torch.cat([x.reshape(batch, length, -1) for x in (q, k, v)], -1), z, b, a
    z = module.in_proj_z(hidden_BLC).unflatten(-1, (-1, module.head_v_dim))
    return (
        module.in_proj_qkv(hidden_BLC),
        z,
        module.in_proj_b(hidden_BLC),
        module.in_proj_a(hidden_BLC),
    )


def mamba2(
    module: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Forward of Mamba-2 of Granite 4 hybrids for the hidden states of a microbatch."""
    context = _microbatch_of(module, cache_params, attention_mask, kwargs)
    hidden_BLC = hidden_states
    projected_TC = module.in_proj(hidden_BLC).flatten(0, 1)
    split = [module.intermediate_size, module.conv_dim, module.num_heads]
    gate_TC, mixed_TC, dt_TG = projected_TC.split(split, -1)
    places = context.places
    if not places.whole:
        mixed_TC, dt_TG = _to_heads(context, _mamba_parts(module), mixed_TC, dt_TG)
    mixed_TC, windows_FWC, index_F = _gathered(module, mixed_TC, context)
    # Read after this call, as above.
    weight_CW, bias_C = module.conv1d.weight.squeeze(1), module.conv1d.bias
    log_rate_G, gate_bias_G, skip_G = module.A_log, module.dt_bias, module.D
    heads, state_dim = module.num_heads, module.ssm_state_size
    sizes = [module.intermediate_size, *[module.n_groups * state_dim] * 2]
    if not places.whole:
        weight_CW, bias_C, sizes = _own_convolution(places, _mamba_parts(module), weight_CW, bias_C)
        log_rate_G, gate_bias_G = places.own_heads(log_rate_G), places.own_heads(gate_bias_G)
        skip_G, heads = places.own_heads(skip_G), places.heads_here(heads)
    mixed_TC = short_convolution(mixed_TC, weight_CW, bias_C, windows_FWC, index_F)
    x, b, c = F.silu(mixed_TC).split(sizes, -1)
    dtype = accumulate_dtype(hidden_BLC.dtype)
    dt_TG = F.softplus(dt_TG + gate_bias_G.to(dt_TG.dtype)).clamp(*module.time_step_limit)
    dt_TG, x_TGE = dt_TG.to(dtype), x.to(dtype).unflatten(-1, (heads, -1))
    o_TGE = _selective_scan(
        module,
        context,
        x_TGE * dt_TG[..., None],
        -log_rate_G.to(dtype).exp() * dt_TG,
        b.to(dtype).unflatten(-1, (-1, state_dim)),
        c.to(dtype).unflatten(-1, (-1, state_dim)),
    )
    o_TGE = o_TGE + x_TGE * skip_G[:, None]
    if not places.whole:
        o_TGE = _to_places(context, o_TGE)
    o_TC = o_TGE.flatten(1)
    normed_TC = module.norm(o_TC, gate_TC).to(hidden_BLC.dtype)
    return module.out_proj(normed_TC.view(*hidden_BLC.shape[:2], -1))


# Heads of a recurrence on several ranks (context parallelism)
# ------------------------------------------------------------

Parts = tuple[tuple[int, int], ...]
"""Number of heads, and channels of a head, for each part of the convolution's channels."""


def _delta_parts(module: Any) -> Parts:
    key_part = (module.num_k_heads, module.head_k_dim)
    return key_part, key_part, (module.num_v_heads, module.head_v_dim)


def _mamba_parts(module: Any) -> Parts:
    group_part = (module.n_groups, module.ssm_state_size)
    heads = module.num_heads
    return (heads, module.intermediate_size // heads), group_part, group_part


@torch.compiler.disable()
def _to_heads(
    context: CallContext, parts: Parts, mixed_TC: Tensor, *gates_TG: Tensor
) -> list[Tensor]:
    """Inputs of the convolution and of gates at all places, for the heads of this rank."""
    pieces = mixed_TC.split([heads * dim for heads, dim in parts], -1)
    by_head = [x.unflatten(-1, part) for x, part in zip(pieces, parts, strict=True)]
    by_head += [gate[..., None] for gate in gates_TG]
    tokens = context.inputs.microbatch.tokens
    found = exchanged_once(lambda: context.places.to_heads(by_head, tokens))
    mixed_TC = torch.cat([x.flatten(1) for x in found[: len(parts)]], -1)
    return [mixed_TC, *(gate[..., 0] for gate in found[len(parts) :])]


@torch.compiler.disable()
def _to_places(context: CallContext, o_TGE: Tensor) -> Tensor:
    """A recurrence's output at this rank's places, for all heads."""
    tokens = context.inputs.microbatch.tokens
    return exchanged_once(lambda: context.places.to_places(o_TGE, tokens))


def _own_convolution(
    places: Places, parts: Parts, weight_CW: Tensor, bias_C: Tensor | None
) -> tuple[Tensor, Tensor | None, list[int]]:
    """Weight and bias for the channels of this rank's heads, and the number of channels of each
    part."""

    def own(x_C: Tensor) -> Tensor:
        pieces = x_C.split([heads * dim for heads, dim in parts])
        by_head = [x.unflatten(0, part) for x, part in zip(pieces, parts, strict=True)]
        return torch.cat([places.own_heads(x).flatten(0, 1) for x in by_head])

    sizes = [places.heads_here(heads) * dim for heads, dim in parts]
    return own(weight_CW), None if bias_C is None else own(bias_C), sizes


# Code that depends on the microbatch or the layer is not compiled, so that compiled code has no
# guards on a microbatch's tables or a layer's index. In the forwards above, no comprehension may
# read local variables: after a graph break, torch 2.11 would continue in a closure that looks up
# globals in the block's Python module.


@torch.compiler.disable()
def _gathered(module: Any, mixed_TC: Tensor, context: CallContext) -> tuple[Tensor, Tensor, Tensor]:
    """The convolution's inputs, the windows of first tokens, and their places.

    Also captures the last inputs that other microbatches start from.
    """
    key = (module, "conv")
    states = context.state.states(module.conv_kernel_size, mixed_TC.device)
    mixed_TC, windows_FWC, tails = gathered_inputs(mixed_TC, states.windows, *states.inputs(key))
    return states.keep(mixed_TC, {key: tails}), windows_FWC, states.windows.places


@torch.compiler.disable()
def _delta_rule(
    module: Any,
    context: CallContext,
    q_THD: Tensor,
    k_THD: Tensor,
    v_TGE: Tensor,
    g_TG: Tensor,
    beta_TG: Tensor,
) -> Tensor:
    states = context.state.states(module.conv_kernel_size, v_TGE.device)
    o_TGE, ends = gated_delta_rule(
        q_THD,
        k_THD,
        v_TGE,
        g_TG,
        beta_TG,
        table=states.table,
        initial_SGDE=states.initial((module, "state"), v_TGE, g_TG, beta_TG),
        kernel=context.config.recurrence_kernel,
    )
    return _kept(module, context, o_TGE, ends)


@torch.compiler.disable()
def _selective_scan(
    module: Any, context: CallContext, x_TGE: Tensor, a_TG: Tensor, b_THD: Tensor, c_THD: Tensor
) -> Tensor:
    states = context.state.states(module.conv_kernel_size, x_TGE.device)
    o_TGE, ends = selective_scan(
        x_TGE,
        a_TG,
        b_THD,
        c_THD,
        table=states.table,
        initial_SGED=states.initial((module, "state"), x_TGE, a_TG),
        kernel=context.config.recurrence_kernel,
    )
    return _kept(module, context, o_TGE, ends)


def _kept(module: Any, context: CallContext, o_TGE: Tensor, ends: Tensor | None) -> Tensor:
    """Capture the states that other microbatches start from. Returns the recurrence's output."""
    states = context.state.states(module.conv_kernel_size, o_TGE.device)
    o_TGE = states.keep(o_TGE, {(module, "state"): ends})
    if module in context.ends_in:
        raise EarlyExit((o_TGE,))
    # Always a view, because compiled code distinguishes views from other tensors.
    return o_TGE.view_as(o_TGE)


RECURRENT_FORWARDS: dict[str, Callable[..., Tensor]] = {
    "Qwen3NextGatedDeltaNet": gated_delta_net,
    "Qwen3_5GatedDeltaNet": gated_delta_net,
    "Qwen3_5MoeGatedDeltaNet": gated_delta_net,
    "GraniteMoeHybridMambaLayer": mamba2,
}
"""Replacements of forwards while microbatches run, by class name."""


def recurrent_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The recurrent modules of a model, by name."""
    return {n: m for n, m in every_module(model) if plain_class(m).__name__ in RECURRENT_FORWARDS}


def _microbatch_of(
    module: nn.Module, cache: Any, mask: Tensor | None, kwargs: dict[str, Any]
) -> CallContext:
    context = taken_context(module, "its recurrence", kwargs)
    if cache is not None or mask is not None:
        found = "a cache" if cache is not None else "an attention mask"
        raise UnsupportedError(
            f"{type(module).__name__} was called with {found}; forkpoint runs whole microbatches "
            "without either. Give no cache and no attention_mask."
        )
    return context


def run_recurrences(model: nn.Module, changes: Changes) -> None:
    """Replace forwards of recurrent modules by those of microbatches, until the changes are
    undone."""
    for module in recurrent_modules(model).values():
        # A method: see `checkpoint_blocks`.
        forward = MethodType(RECURRENT_FORWARDS[plain_class(module).__name__], module)
        changes.replace_forward(module, forward)
