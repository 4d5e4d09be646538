"""Sizes of prefix caches in host memory."""

from forkpoint.plan.pricing.cost import ModelShape

LAYERS_HERE = 2
"""Number of layers with their prefix cache in host memory that are on the device at a time: one is
read, and the next one is copied."""


def layer_cache_bytes(cache_tokens: int, shape: ModelShape) -> int:
    """Bytes of the prefix cache of these tokens in one attention layer, with its gradients."""
    return cache_tokens * shape.exchanged_token_bytes // max(1, shape.attention_layers)


def most_host_layers(cache_tokens: int, shape: ModelShape, host_memory: int | None) -> int:
    """Number of layers whose prefix cache fits in `host_memory` bytes; None means no limit."""
    layer = layer_cache_bytes(cache_tokens, shape)
    if host_memory is None or not layer:
        return shape.attention_layers
    return min(shape.attention_layers, host_memory // layer)
