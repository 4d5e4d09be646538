"""Layers of transformers that carry a state along the path, run over the segments of a row.

While rows run, the forward of each such module is one of these, set on the instance. It uses the
module's own projections, convolution weights, gates and norm; what it replaces is the call of the
stock recurrence, which knows no segments.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forkpoint.engine.rows import RowContext
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.arguments import RowEnds, taken_context
from forkpoint.ops.attention import accumulate_dtype
from forkpoint.ops.delta_rule import gated_delta_rule
from forkpoint.ops.delta_rule.kernel import decay_gate
from forkpoint.ops.recurrence import short_convolution
from forkpoint.ops.selective_scan import selective_scan

RecurrentForward = Callable[[Any, Tensor, RowContext], Tensor]


def gated_delta_net(module: Any, hidden_BLC: Tensor, context: RowContext) -> Tensor:
    """Gated DeltaNet of Qwen3-Next and Qwen3.5: hidden states of a row in, its output out."""
    mixed_TC, z_TGE, b_TG, a_TG = (x.flatten(0, 1) for x in _projected(module, hidden_BLC))
    layer = module.layer_idx
    states = context.states(module.conv_kernel_size, hidden_BLC.device)
    mixed_TC, tails = short_convolution(
        mixed_TC,
        module.conv1d.weight.squeeze(1),
        module.conv1d.bias,
        states.windows,
        *states.inputs((layer, "conv")),
    )
    sizes = [module.key_dim, module.key_dim, module.value_dim]
    q, k, v = F.silu(mixed_TC).to(hidden_BLC.dtype).split(sizes, -1)
    dtype = accumulate_dtype(v.dtype)
    g_TG = decay_gate(a_TG.to(dtype), module.A_log.to(dtype), module.dt_bias.to(dtype))
    beta_TG = b_TG.sigmoid()
    key = (layer, "state")
    o_TGE, ends = gated_delta_rule(
        q.unflatten(-1, (-1, module.head_k_dim)),
        k.unflatten(-1, (-1, module.head_k_dim)),
        v.unflatten(-1, (-1, module.head_v_dim)),
        g_TG,
        beta_TG,
        table=states.table,
        initial_SGDE=states.initial(key, mixed_TC, g_TG, beta_TG),
        kernel=context.recurrence_kernel,
    )
    o_TGE = states.keep(o_TGE, {(layer, "conv"): tails, key: ends})
    if layer == context.last_layer:
        raise RowEnds((o_TGE,))
    dim = module.head_v_dim
    o_BLC = module.norm(o_TGE.reshape(-1, dim), z_TGE.reshape(-1, dim))
    return module.out_proj(o_BLC.reshape(*hidden_BLC.shape[:2], -1))


def _projected(module: Any, hidden_BLC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the convolution, the output's gate, and what beta and the decay are made of."""
    batch, length, _ = hidden_BLC.shape
    if type(module).__name__ == "Qwen3NextGatedDeltaNet":
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


def mamba2(module: Any, hidden_BLC: Tensor, context: RowContext) -> Tensor:
    """Mamba-2 of Granite 4 hybrids: hidden states of a row in, its output out."""
    projected_TC = module.in_proj(hidden_BLC).flatten(0, 1)
    inner, heads, state_dim = module.intermediate_size, module.num_heads, module.ssm_state_size
    gate_TC, mixed_TC, dt_TG = projected_TC.split([inner, module.conv_dim, heads], -1)
    layer = module.layer_idx
    states = context.states(module.conv_kernel_size, hidden_BLC.device)
    mixed_TC, tails = short_convolution(
        mixed_TC,
        module.conv1d.weight.squeeze(1),
        module.conv1d.bias,
        states.windows,
        *states.inputs((layer, "conv")),
    )
    grouped = module.n_groups * state_dim
    x, b, c = F.silu(mixed_TC).split([inner, grouped, grouped], -1)
    dtype = accumulate_dtype(hidden_BLC.dtype)
    dt_TG = F.softplus(dt_TG + module.dt_bias.to(dt_TG.dtype)).clamp(*module.time_step_limit)
    dt_TG, x_TGE = dt_TG.to(dtype), x.to(dtype).unflatten(-1, (heads, -1))
    a_TG = -module.A_log.to(dtype).exp() * dt_TG
    b_THD, c_THD = (y.to(dtype).unflatten(-1, (-1, state_dim)) for y in (b, c))
    key = (layer, "state")
    o_TGE, ends = selective_scan(
        x_TGE * dt_TG[..., None],
        a_TG,
        b_THD,
        c_THD,
        table=states.table,
        initial_SGED=states.initial(key, mixed_TC, dt_TG),
        kernel=context.recurrence_kernel,
    )
    o_TGE = states.keep(o_TGE, {(layer, "conv"): tails, key: ends})
    if layer == context.last_layer:
        raise RowEnds((o_TGE,))
    o_TC = (o_TGE + x_TGE * module.D[:, None]).flatten(1)
    normed_TC = module.norm(o_TC, gate_TC).to(hidden_BLC.dtype)
    return module.out_proj(normed_TC.view(*hidden_BLC.shape[:2], -1))


RECURRENT_FORWARDS: dict[str, RecurrentForward] = {
    "Qwen3NextGatedDeltaNet": gated_delta_net,
    "Qwen3_5GatedDeltaNet": gated_delta_net,
    "Qwen3_5MoeGatedDeltaNet": gated_delta_net,
    "GraniteMoeHybridMambaLayer": mamba2,
}
"""By class, what stands in for its forward while rows run."""


def recurrent_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model, by name, that carry a state along the path."""
    return {n: m for n, m in model.named_modules() if type(m).__name__ in RECURRENT_FORWARDS}


def check_recurrent_modules(model: nn.Module) -> None:
    """Refuse what the stand-ins would not honour of a module."""
    for name, module in recurrent_modules(model).items():
        convolution = getattr(module, "conv1d", None)
        if type(convolution) is not nn.Conv1d:
            raise UnsupportedError(
                f"{name}.conv1d is a {type(convolution).__module__}.{type(convolution).__name__}; "
                "forkpoint computes the convolution from the weight of a plain torch.nn.Conv1d, as "
                "the stock model does. Leave conv1d out of adapters and quantization."
            )
        activation = getattr(module, "activation", None)
        if activation not in ("silu", "swish"):
            raise UnsupportedError(
                f"{name} has activation {activation!r} after its convolution; only 'silu' has been "
                "shown exact."
            )


def _forward(
    module: nn.Module,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    context = taken_context(module, "its recurrence", kwargs)
    if cache_params is not None or attention_mask is not None:
        found = "a cache" if cache_params is not None else "an attention mask"
        raise UnsupportedError(
            f"{type(module).__name__} was called with {found}; forkpoint runs whole rows without "
            "either. Give no past_key_values and no attention_mask."
        )
    return RECURRENT_FORWARDS[type(module).__name__](module, hidden_states, context)


@contextmanager
def recurrent_forwards(model: nn.Module) -> Iterator[None]:
    """Within it these modules run rows; after it, whatever happened, they are as they were."""
    with ExitStack() as stack:
        for module in recurrent_modules(model).values():
            attributes = vars(module)
            own = {"forward": attributes["forward"]} if "forward" in attributes else {}
            stack.callback(attributes.update, own)
            stack.callback(attributes.pop, "forward", None)
            module.forward = partial(_forward, module)
        yield
