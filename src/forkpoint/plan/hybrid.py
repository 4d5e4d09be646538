"""Counts of layers that carry a state along the path in place of attention.

Such a layer's work is the same for every token, wherever it lies on its path: the products of its
projections, its convolution, and the recurrence as it is defined, one token after another (kernels
do more in chunks, which is not counted as useful). So one number a token says all: its
multiply-adds, which a backward has twice as many of, like those of weights.
"""

from collections.abc import Mapping
from typing import Any

DELTA_RULE_KINDS = ("linear_attention",)
"""Values of a configuration's layer_types."""


def recurrent_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds among `layer_types` that carry a state."""
    return DELTA_RULE_KINDS if config.get("linear_num_value_heads") else ()


def recurrent_shape(config: Mapping[str, Any], kinds: list[str]) -> dict[str, int]:
    """The fields of a ModelShape that count recurrent layers; empty where there are none."""
    recurrent = [kind for kind in kinds if kind in recurrent_kinds(config)]
    if not recurrent:
        return {}
    return {"recurrent_layers": len(recurrent), **_gated_delta_net(config)}


def _gated_delta_net(config: Mapping[str, Any]) -> dict[str, int]:
    hidden = int(config["hidden_size"])
    keys, values = (int(config[f"linear_num_{kind}_heads"]) for kind in ("key", "value"))
    key_dim, value_dim = (int(config[f"linear_{kind}_head_dim"]) for kind in ("key", "value"))
    width = int(config["linear_conv_kernel_dim"])
    mixed, out = 2 * keys * key_dim + values * value_dim, values * value_dim
    state = values * key_dim * value_dim
    # q, k, v, z, beta and the decay in; the output out. The state is read for what it holds of a
    # key, written to, and read by the query.
    weights = hidden * (mixed + out + 2 * values) + out * hidden
    return {
        "recurrent_parameters": weights + width * mixed + 3 * state,
        "state_elements": state,
        "tail_elements": (width - 1) * mixed,
        # Before and after the convolution and its activation; q, k and v as the recurrence reads
        # them, with the chunk's triangular matrix; its output, the gate, and the norm's result.
        "recurrent_activations": 4 * mixed + 64 * values + 4 * out,
    }
