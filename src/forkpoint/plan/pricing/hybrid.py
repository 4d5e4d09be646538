"""Counts of models in which some layers carry a state along the path in place of attention.

Such a layer's work is the same for every token, wherever it lies on its path: the products of its
projections, its convolution, and the recurrence as it is defined, one token after another (kernels
do more in chunks, which is not counted as useful). So one number a token says all: its
multiply-adds, which a backward has twice as many of, like those of weights.
"""

from collections.abc import Mapping
from typing import Any

from forkpoint.plan.pricing.sizes import needed

CHUNK = 64
"""Tokens whose triangular matrix a chunked recurrence keeps, for each token and head."""


def recurrent_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds among `layer_types` that carry a state."""
    known = config.get("linear_num_value_heads") or config.get("mamba_n_heads")
    return ("linear_attention", "mamba") if known else ()


def recurrent_shape(config: Mapping[str, Any], kinds: list[str]) -> dict[str, int]:
    """The fields of a ModelShape that such models have; empty for others."""
    recurrent = [kind for kind in kinds if kind in recurrent_kinds(config)]
    if not recurrent:
        return {}
    counts = _mamba2(config) if config.get("mamba_n_heads") else _gated_delta_net(config)
    return {"recurrent_layers": len(recurrent), **counts}


def _gated_delta_net(config: Mapping[str, Any]) -> dict[str, int]:
    """Qwen3-Next and Qwen3.5, whose attention has a gate as well, made by its query projection."""
    hidden = needed(config, "hidden_size")
    heads, kv_heads = (needed(config, f"num_{kind}_heads") for kind in ("attention", "key_value"))
    attention_dim = needed(config, "head_dim")
    keys, values = (needed(config, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    key_dim, value_dim = (needed(config, f"linear_{kind}_head_dim") for kind in ("key", "value"))
    width = needed(config, "linear_conv_kernel_dim")
    mixed, out = 2 * keys * key_dim + values * value_dim, values * value_dim
    state = values * key_dim * value_dim
    # q, k, v, the gate, beta and the decay in; the output out. The state is read for what it holds
    # of a key, written to, and read by the query.
    weights = hidden * (mixed + out + 2 * values) + out * hidden
    return {
        "attention_parameters": hidden * attention_dim * (3 * heads + 2 * kv_heads),
        "attention_activations": 2 * heads * attention_dim,
        "recurrent_parameters": weights + width * mixed + 3 * state,
        "state_elements": state,
        "tail_elements": (width - 1) * mixed,
        # Before and after the convolution and its activation, and as the recurrence reads it, with
        # the chunk's triangular matrix; the recurrence's output, the gate, and the norm's result.
        "recurrent_activations": 4 * mixed + CHUNK * values + 4 * out,
    }


def _mamba2(config: Mapping[str, Any]) -> dict[str, int]:
    hidden, heads = needed(config, "hidden_size"), needed(config, "mamba_n_heads")
    inner, state_dim = heads * needed(config, "mamba_d_head"), needed(config, "mamba_d_state")
    width = needed(config, "mamba_d_conv")
    mixed = inner + 2 * needed(config, "mamba_n_groups") * state_dim
    state = inner * state_dim
    # The state is written to and read; x, B, C, the gate and the time steps in, the output out.
    weights = hidden * (mixed + inner + heads) + inner * hidden
    return {
        "recurrent_parameters": weights + width * mixed + 2 * state,
        "state_elements": state,
        "tail_elements": (width - 1) * mixed,
        "recurrent_activations": 4 * mixed + CHUNK * heads + 4 * inner,
    }
