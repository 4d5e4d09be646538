"""Counts of work and memory of mixtures of experts.

Products are those of an MLP as wide as all experts of a token together. A forward keeps more for
its backward than such an MLP: each expert gets a copy of the token and has a separate output, which
the backward needs for the gradient of the expert's weight. In transformers, grouped_mm keeps these
two tensors. eager also keeps the weighted output, for index_add. batched_mm keeps a copy of the
matrices of an expert for every token.
"""

from collections.abc import Mapping
from typing import Any

from forkpoint.plan.pricing.sizes import count, needed

EAGER, GROUPED, BATCHED = "eager", "grouped_mm", "batched_mm"
ROUTER_FLOAT_BYTES = 4
"""Bytes of a router's float32 softmax, which the backward needs."""
COMPUTED_WIDE = ("n_routed_experts", "n_shared_experts")
"""Keys of the configurations of DeepSeek-V3 and GLM-4-MoE. Their routers multiply in float32, and
keep a float32 copy of the token in narrower models."""
INDEX_BYTES = 8
INDICES = 4
"""Number of kept index values for each expert of a token: the sorted order, its inverse, and the
indices of the tokens."""


def active_intermediate(config: Mapping[str, Any], layers: int) -> int:
    """Width of the MLP for one token, as the mean over layers.

    In mixtures of experts it is the total width of the routed and the shared experts of the token.
    """
    dense = 0 if only_experts(config) else needed(config, "intermediate_size")
    if config.get("use_double_wide_mlp"):  # of layers that reuse keys and values (Gemma 4)
        dense += dense * count(config, "num_kv_shared_layers") // layers
    if _is_llama4(config):
        experts, mixed = _routed(config) + 1, _llama4_layers(config, layers)
        alone = (layers - mixed) * needed(config, "intermediate_size_mlp")
        return (alone + mixed * experts * dense) // layers
    if not _routed(config):
        return count(config, "shared_intermediate_size", dense)
    width = count(config, "moe_intermediate_size", dense)
    expert = (_routed(config) + count(config, "n_shared_experts")) * width
    if config.get("num_local_experts") == 0:
        expert = 0
    for shared in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        expert += count(config, shared)
    if config.get("enable_moe_block"):  # beside an MLP (Gemma 4)
        expert += dense
    first = _first_dense(config, layers)
    return (first * dense + (layers - first) * expert) // layers


def mixture_shape(config: Mapping[str, Any], layers: int, dtype_bytes: int) -> dict[str, int]:
    """Fields of a ModelShape for mixtures of experts; empty for other models."""
    chosen = _routed(config)
    if not chosen or config.get("num_local_experts") == 0:
        return {}
    router = 0
    if dtype_bytes < 4 and any(count(config, name) for name in COMPUTED_WIDE):
        router = needed(config, "hidden_size") * ROUTER_FLOAT_BYTES
    experts = max(chosen, _experts(config))
    mixed = layers - _first_dense(config, layers)
    return {
        "expert_layers": _llama4_layers(config, layers) if _is_llama4(config) else mixed,
        "expert_activations": expert_activations(config, GROUPED),
        "router_bytes": router + experts * ROUTER_FLOAT_BYTES + INDICES * chosen * INDEX_BYTES,
    }


def expert_activations(config: Mapping[str, Any], implementation: str | None) -> int:
    """Number of values that a token keeps in one layer of experts, in addition to those of an MLP
    of the same width.

    implementation: implementation of experts in transformers. Others than eager and batched_mm
    count as grouped_mm.
    """
    chosen, hidden = _routed(config), needed(config, "hidden_size")
    eager = implementation == EAGER or _is_llama4(config)  # which has only this one
    kept = (3 if eager else 2) * chosen * hidden
    if count(config, "shared_expert_intermediate_size"):
        kept += hidden  # the shared expert's output, which has a gate
    dense = 0 if only_experts(config) else needed(config, "intermediate_size")
    width = count(config, "moe_intermediate_size", dense)
    # Configurations of gpt-oss name the limit from transformers 5.18 on or so.
    if config.get("swiglu_limit") is not None or config.get("model_type") == "gpt_oss":
        kept += 3 * chosen * width  # for the clamped gate
    if implementation == BATCHED:
        kept += 3 * chosen * hidden * width
    return kept


def idle_expert_width(config: Mapping[str, Any]) -> int:
    """Total width of the experts of a layer that do not compute a token."""
    width = count(config, "moe_intermediate_size", count(config, "intermediate_size"))
    return max(0, _experts(config) - _routed(config)) * width


def only_experts(config: Mapping[str, Any]) -> bool:
    """Whether all layers have experts, so that the configuration needs no width of an MLP."""
    experts = config.get("num_experts_per_tok") and config.get("moe_intermediate_size")
    return bool(experts) and "intermediate_size" not in config


def _routed(config: Mapping[str, Any]) -> int:
    """Number of experts that compute a token. In Llama 4 all experts compute all tokens, most of
    them with zeros."""
    if _is_llama4(config):
        return count(config, "num_local_experts")
    if config.get("enable_moe_block"):
        return count(config, "top_k_experts")
    return count(config, "num_experts_per_tok")


def _experts(config: Mapping[str, Any]) -> int:
    """Number of experts of a layer, without shared ones."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((found for name in names if (found := count(config, name))), 0)


def _is_llama4(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "llama4_text"


def _llama4_layers(config: Mapping[str, Any], layers: int) -> int:
    """Number of layers of Llama 4 with experts."""
    given = config.get("moe_layers")
    if isinstance(given, list | tuple):
        return min(layers, len(given))
    return layers // max(1, count(config, "interleave_moe_layer_step", 1))


def _first_dense(config: Mapping[str, Any], layers: int) -> int:
    """Number of first layers that have an MLP instead of experts."""
    return min(layers, count(config, "first_k_dense_replace"))
