"""The layers of a mixture of experts that fit on a device."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from benchmarks.steps.stepper import DENSE_ROW_TOKENS, Stepper

Experts = Literal["grouped_mm", "batched_mm", "eager"]
LONGEST_PREFIX = 8192
ROOM = 0.85
"""The share of the device that weights, gradients and activations are to take."""
HEAD_BYTES = 12 << 30
"""Logits of a microbatch, and what its kernels allocate."""


def layer_parameters(sizes: Mapping[str, Any]) -> int:
    """Weights of one layer."""
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    dim, kv_heads = sizes["head_dim"], sizes["num_key_value_heads"]
    experts = sizes["num_experts"] * 3 * hidden * sizes["moe_intermediate_size"]
    return experts + 2 * hidden * dim * (heads + kv_heads) + hidden * sizes["num_experts"]


def kept_elements(sizes: Mapping[str, Any]) -> int:
    """Elements that a token's forward leaves for the backward in one layer.

    For each of its experts: its copy of the hidden state and its output, the gate and the up
    values together, the gate's activation and the product. Besides them what attention keeps.
    """
    hidden, width = sizes["hidden_size"], sizes["moe_intermediate_size"]
    each = 2 * hidden + 4 * width
    heads = sizes["num_attention_heads"] + sizes["num_key_value_heads"]
    return sizes["num_experts_per_tok"] * each + 8 * hidden + 3 * heads * sizes["head_dim"]


def layers_that_fit(
    sizes: Mapping[str, Any], device: torch.device, *, checkpointed: bool = False
) -> int:
    """How many layers fit on the device in 16 bits: weights, gradients, and the activations of a
    microbatch of 16,384 tokens below a prefix of 8,192. On a CPU all of them."""
    every: int = sizes["num_hidden_layers"]
    if device.type != "cuda":
        return every
    _, total = torch.cuda.mem_get_info(device)
    head = 4 * sizes["vocab_size"] * sizes["hidden_size"] * 2
    kept = sizes["hidden_size"] if checkpointed else kept_elements(sizes)
    tokens = DENSE_ROW_TOKENS + LONGEST_PREFIX
    each = 2 * (2 * layer_parameters(sizes) + tokens * kept)
    return max(1, min(every, int((total * ROOM - head - HEAD_BYTES) / each)))


def share_that_is_counted(stepper: Stepper) -> float:
    """The planner's count of activations over `kept_elements`: it leaves out the copies of hidden
    states that experts work on, so that it is given less memory than there is."""
    shape, config = stepper.policy.host.shape, stepper.model.config
    counted = shape.activation_bytes()
    if shape.checkpointed:
        return 0.8
    kept = shape.layers * shape.dtype_bytes * kept_elements(vars(config))  # pyright: ignore
    return min(1.0, counted / kept)
