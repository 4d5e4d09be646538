"""Random tiny configurations of every supported family, and models of them without neutral values.

Every part that a family's configuration can switch or size is drawn: heads, windows by layer, caps,
norms of queries and keys, biases, rotary embeddings, experts, ranks. Then all parameters are drawn
anew, so that no norm is 1, no bias 0 and no sink absent.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from numpy.random import Generator
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from versions import eager_experts

Settings = dict[str, Any]
Value = TypeVar("Value")
Draw = Callable[[Generator, Settings], Settings]

VOCABULARY = 40
LONGEST = 96
"""No rollout has more tokens."""


def one_of(random: Generator, values: Sequence[Value]) -> Value:
    return values[int(random.integers(len(values)))]


def chance(random: Generator, probability: float) -> bool:
    return bool(random.random() < probability)


def between(random: Generator, low: int, high: int) -> int:
    """A whole number from `low` to `high`, both possible."""
    return int(random.integers(low, high + 1))


def draw_settings(random: Generator, family: str) -> Settings:
    """Settings of the family's configuration, for a model of 1 to 4 layers and width 8 to 32."""
    key_heads = between(random, 1, 4)
    heads = key_heads * between(random, 1, 8 // key_heads)
    head_dim = one_of(random, (2, 4, 6, 8, 12, 16))
    width = heads * between(random, math.ceil(8 / heads), 32 // heads)
    if family == "helium":  # its output projection is as wide as the model
        head_dim = one_of(random, (2, 4))
        width = heads * head_dim
    settings: Settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * between(random, 2, 20),
        "num_hidden_layers": between(random, 1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 2 * LONGEST,
        "tie_word_embeddings": chance(random, 0.4),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    settings |= SPECIAL[family](random, settings)
    if "rope_parameters" not in settings:
        settings["rope_parameters"] = draw_rope(random, settings["head_dim"])
    return settings


def build(family: str, settings: Settings, seed: int) -> PreTrainedModel:
    """The model in float64, with the stock attention written out ("eager")."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(family, **settings)
        state = torch.get_rng_state()
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        torch.set_rng_state(state)
    model = model.double()
    eager_experts(model)
    _draw_parameters(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def _draw_parameters(model: PreTrainedModel, generator: torch.Generator) -> None:
    gain = 0.5 + float(torch.rand((), generator=generator))
    values = [*model.named_parameters()]
    # What DeepSeek and GLM choose experts by is a buffer, and 0 before training.
    values += [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    for name, value in values:
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        if value.dim() == 1:
            value.copy_((1.0 if name.endswith("norm.weight") else 0.0) + 0.3 * noise)
        elif "embed" in name:
            value.copy_(0.5 * noise)
        else:
            value.copy_(gain * noise / math.sqrt(value.shape[-1]))


# Parts that families have in common --------------------------------------------------------------


def draw_rope(random: Generator, head_dim: int, *, partial: bool = False) -> Settings:
    """Rotary embeddings that do not depend on a rollout's length, half of them the plain ones."""
    kind = one_of(random, ("default",) * 5 + ("linear", "llama3", "yarn", "yarn", "dynamic"))
    rotary = 2 * between(random, 1, head_dim // 2) if partial else head_dim
    if kind == "dynamic" and rotary == 2:  # transformers divides by what is above 2
        kind = "linear"
    found: Settings = {"rope_type": kind, "rope_theta": one_of(random, (50.0, 10_000.0, 1e6))}
    if partial:
        found["partial_rotary_factor"] = rotary / head_dim
    if kind != "default":
        found["factor"] = one_of(random, (2.0, 4.0))
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = int(2 * LONGEST / found["factor"])
    return found


def _partial_rope(random: Generator, settings: Settings) -> Settings:
    """Rotary embeddings of a part of the head dim, told both where newer versions look for the
    part and where the defaults of older ones would win."""
    rope = draw_rope(random, settings["head_dim"], partial=True)
    return {"rope_parameters": rope, "partial_rotary_factor": rope["partial_rotary_factor"]}


def _two_ropes(random: Generator, settings: Settings) -> Settings:
    sliding = {"rope_type": "default", "rope_theta": 100.0}
    full = draw_rope(random, settings["head_dim"])
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def _layer_types(random: Generator, layers: int) -> list[str]:
    return [one_of(random, ("sliding_attention", "full_attention")) for _ in range(layers)]


def _window(random: Generator) -> int:
    return between(random, 1, 12)


def _biased(probability: float = 0.4, *names: str) -> Draw:
    return lambda random, _: {n: chance(random, probability) for n in names or ("attention_bias",)}


def _one_window(random: Generator, _: Settings) -> Settings:
    return {"sliding_window": _window(random) if chance(random, 0.7) else None}


def _window_by_layer(random: Generator, settings: Settings) -> Settings:
    types = {"sliding_window": _window(random)}
    return types | {"layer_types": _layer_types(random, settings["num_hidden_layers"])}


def _experts(name: str) -> Draw:
    def draw(random: Generator, _: Settings) -> Settings:
        experts = between(random, 2, 6)
        return {name: experts, "num_experts_per_tok": between(random, 1, min(3, experts))}

    return draw


def _all(*draws: Draw, **fixed: Any) -> Draw:
    """The settings of each in turn; a callable in `fixed` draws one value."""

    def draw(random: Generator, settings: Settings) -> Settings:
        found: Settings = {}
        for one in draws:
            found |= one(random, settings)
        return found | {name: value(random) for name, value in fixed.items()}

    return draw


def _of(*values: Any) -> Callable[[Generator], Any]:
    return lambda random: one_of(random, values)


def _odds(probability: float) -> Callable[[Generator], bool]:
    return lambda random: chance(random, probability)


def _even(low: int, high: int) -> Callable[[Generator], int]:
    return lambda random: 2 * between(random, low, high)


def _grouped_experts(random: Generator, settings: Settings) -> Settings:
    """Experts in groups of at least two, of which the best groups are chosen first."""
    groups = between(random, 1, 3)
    in_group = between(random, 2, 3)
    chosen = between(random, 1, groups)
    return {
        "n_routed_experts": groups * in_group,
        "n_group": groups,
        "topk_group": chosen,
        "num_experts_per_tok": between(random, 1, min(3, chosen * in_group)),
        "n_shared_experts": between(random, 1, 2),
        "moe_intermediate_size": 2 * between(random, 2, 10),
        "first_k_dense_replace": between(random, 0, settings["num_hidden_layers"]),
        "routed_scaling_factor": one_of(random, (1.0, 2.5)),
        "norm_topk_prob": chance(random, 0.5),
        "attention_bias": chance(random, 0.5),
    }


# What a family has besides -----------------------------------------------------------------------


def _qwen(random: Generator, settings: Settings) -> Settings:
    if not chance(random, 0.75):
        return {"use_sliding_window": False}
    found: Settings = {"use_sliding_window": True, "sliding_window": _window(random)}
    layers = settings["num_hidden_layers"]
    if chance(random, 0.5):
        return found | {"layer_types": _layer_types(random, layers)}
    return found | {"max_window_layers": between(random, 0, layers)}


def _some_layers(random: Generator, settings: Settings) -> Settings:
    layers = settings["num_hidden_layers"]
    return {"mlp_only_layers": [i for i in range(layers) if chance(random, 0.2)]}


def _delta_rule(random: Generator, settings: Settings) -> Settings:
    """Layers that carry a state from token to token, and a convolution that reads the last few."""
    heads = between(random, 1, 3)
    kinds = ("linear_attention", "linear_attention", "full_attention")
    return {
        **_partial_rope(random, settings),
        "layer_types": [one_of(random, kinds) for _ in range(settings["num_hidden_layers"])],
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * between(random, 1, 2),
        "linear_key_head_dim": between(random, 1, 8),
        "linear_value_head_dim": between(random, 1, 8),
        "linear_conv_kernel_dim": between(random, 2, 5),
        "attention_bias": chance(random, 0.4),
    }


_delta_rule_moe = _all(
    _delta_rule,
    _experts("num_experts"),
    moe_intermediate_size=_even(2, 10),
    shared_expert_intermediate_size=_even(2, 10),
)
_gemma2 = _all(
    _window_by_layer,
    _biased(),
    query_pre_attn_scalar=_of(1, 4, 16),
    attn_logit_softcapping=_of(None, 1.0, 5.0, 50.0),
    final_logit_softcapping=_of(None, 2.0, 10.0, 30.0),
)


def _gemma3(random: Generator, settings: Settings) -> Settings:
    found = _gemma2(random, settings) | _two_ropes(random, settings)
    if chance(random, 0.4):
        del found["layer_types"]
        found["sliding_window_pattern"] = between(random, 1, 3)
    return found


def _gemma4(random: Generator, settings: Settings) -> Settings:
    layers, dim = settings["num_hidden_layers"], settings["head_dim"]
    kinds = [*_layer_types(random, layers - 1), "full_attention"]
    # Before the layers that reuse keys and values there is one of each kind.
    most = max(n for n in range(layers) if set(kinds[: layers - n]) == set(kinds))
    inputs = one_of(random, (0, 3, 6))
    full = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    found: Settings = {
        "layer_types": kinds,
        "sliding_window": _window(random),
        # Without inputs by layer newer versions of transformers raise an error there.
        "num_kv_shared_layers": between(random, 0, most if inputs else 0),
        "use_double_wide_mlp": chance(random, 0.5),
        "global_head_dim": dim * between(random, 1, 2),
        "attention_k_eq_v": chance(random, 0.3),
        "attention_bias": chance(random, 0.4),
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": VOCABULARY,
        "final_logit_softcapping": one_of(random, (None, 2.0, 10.0)),
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }
    if chance(random, 0.5):
        experts = between(random, 2, 6)
        chosen = between(random, 1, min(3, experts))
        found |= {"enable_moe_block": True, "num_experts": experts, "top_k_experts": chosen}
        found["moe_intermediate_size"] = 2 * between(random, 2, 10)
    return found


def _llama4(random: Generator, settings: Settings) -> Settings:
    return {
        "no_rope_layers": [int(chance(random, 0.6)) for _ in range(settings["num_hidden_layers"])],
        "attention_chunk_size": _window(random),
        "attn_temperature_tuning": chance(random, 0.7),
        "floor_scale": between(random, 1, 8),
        "attn_scale": one_of(random, (0.1, 0.7)),
        "use_qk_norm": chance(random, 0.5),
        "attention_bias": chance(random, 0.4),
        "interleave_moe_layer_step": between(random, 1, 2),
        "intermediate_size_mlp": 2 * between(random, 2, 20),
        **_experts("num_local_experts")(random, settings),
    }


def _phi(random: Generator, settings: Settings) -> Settings:
    # Norms, and in older versions rotary embeddings, take the head dim from the width.
    width = settings["num_attention_heads"] * settings["head_dim"]
    found = _partial_rope(random, settings)
    return found | {"qk_layernorm": chance(random, 0.5), "hidden_size": width}


def _phi3(random: Generator, settings: Settings) -> Settings:
    dim = settings["head_dim"]
    rotary = 2 * between(random, 1, dim // 2)
    rope: Settings = {"rope_type": "default", "rope_theta": one_of(random, (50.0, 10_000.0))}
    found = _one_window(random, settings)
    if chance(random, 0.4):
        # Its check of the factors takes the head dim from the width.
        found["hidden_size"] = settings["num_attention_heads"] * dim
        factors = [1.0 + 0.5 * float(random.random()) for _ in range(rotary // 2)]
        rope = {**rope, "rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        found["original_max_position_embeddings"] = LONGEST
        found["max_position_embeddings"] = 4 * LONGEST
    return found | {"rope_parameters": {**rope, "partial_rotary_factor": rotary / dim}}


def _smollm3(random: Generator, settings: Settings) -> Settings:
    layers = settings["num_hidden_layers"]
    found: Settings = {
        "no_rope_layers": [int(chance(random, 0.5)) for _ in range(layers)],
        "attention_bias": chance(random, 0.4),
        "mlp_bias": chance(random, 0.4),
    }
    if chance(random, 0.7):
        found |= {"use_sliding_window": True, "sliding_window": _window(random)}
        if chance(random, 0.5):
            found["layer_types"] = _layer_types(random, layers)
    return found


_llama = _biased(0.4, "attention_bias", "mlp_bias")
_granite = _all(
    _llama,
    embedding_multiplier=_of(1.0, 3.0),
    logits_scaling=_of(0.5, 1.0, 4.0),
    residual_multiplier=_of(0.3, 1.0),
    attention_multiplier=_of(0.1, 0.5, 1.0),
)


def _granitemoe(random: Generator, settings: Settings) -> Settings:
    found = _granite(random, settings) | _experts("num_local_experts")(random, settings)
    del found["mlp_bias"]
    return found


def _granitemoehybrid(random: Generator, settings: Settings) -> Settings:
    found = _granite(random, settings)
    del found["mlp_bias"]
    # Kinds of layers have other names in older versions; those without a choice carry a state.
    carries = CONFIG_MAPPING["granitemoehybrid"]().layers_block_type[0]
    kinds = (carries, carries, {"mamba": "attention"}.get(carries, "full_attention"))
    groups = between(random, 1, 2)
    heads = groups * between(random, 1, 2)
    width = 24  # a multiple of any number of heads
    heads_of_attention = one_of(random, (1, 2, 4, 6))
    return {
        **found,
        "num_local_experts": one_of(random, (0, 3, 5)),
        "num_experts_per_tok": between(random, 1, 3),
        "num_attention_heads": heads_of_attention,
        "num_key_value_heads": one_of(random, (1, heads_of_attention)),
        "layer_types": [one_of(random, kinds) for _ in range(settings["num_hidden_layers"])],
        "shared_intermediate_size": 2 * between(random, 2, 12),
        "position_embedding_type": one_of(random, (None, "rope")),
        "hidden_size": width,
        "mamba_expand": 2,
        "mamba_n_heads": heads,
        "mamba_d_head": 2 * width // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": between(random, 1, 8),
        "mamba_d_conv": between(random, 2, 4),
        "mamba_chunk_size": one_of(random, (4, 16)),
        "mamba_conv_bias": chance(random, 0.7),
        "mamba_proj_bias": chance(random, 0.5),
    }


def _deepseek_v3(random: Generator, settings: Settings) -> Settings:
    rotary = one_of(random, (2, 4, 6))
    return {
        **_grouped_experts(random, settings),
        "num_key_value_heads": settings["num_attention_heads"],
        "q_lora_rank": one_of(random, (None, 1, 4, 12)),
        "kv_lora_rank": one_of(random, (1, 4, 12)),
        "qk_rope_head_dim": rotary,
        "head_dim": rotary,
        "qk_nope_head_dim": one_of(random, (1, 4, 8)),
        "v_head_dim": one_of(random, (1, 4, 6, 10)),
        "rope_interleave": chance(random, 0.5),
    }


def _exaone4(random: Generator, settings: Settings) -> Settings:
    if chance(random, 0.5):
        return _window_by_layer(random, settings)
    return {"sliding_window": _window(random), "sliding_window_pattern": between(random, 1, 4)}


# A family is drawn if it is here.
SPECIAL: dict[str, Draw] = {
    "llama": _llama,
    "qwen2": _qwen,
    "qwen3": _all(_qwen, _biased(0.5)),
    "qwen3_moe": _all(
        _experts("num_experts"),
        _all(moe_intermediate_size=_even(2, 10), norm_topk_prob=_odds(0.5)),
        _all(decoder_sparse_step=_of(1, 2)),
        _some_layers,
        attention_bias=_odds(0.4),
        use_sliding_window=_odds(0.5),
        sliding_window=_window,
    ),
    "qwen3_next": _all(_delta_rule_moe, _all(norm_topk_prob=_odds(0.5)), _some_layers),
    "qwen3_5_text": _delta_rule,
    "qwen3_5_moe_text": _delta_rule_moe,
    "mistral": _one_window,
    "ministral": _window_by_layer,
    "mixtral": _all(_one_window, _experts("num_local_experts")),
    "gemma": _biased(),
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "llama4_text": _llama4,
    "olmo": _all(clip_qkv=_of(None, 0.5, 2.0), attention_bias=_odds(0.4)),
    "olmo2": _biased(),
    "olmo3": _all(_window_by_layer, _biased(), _two_ropes),
    "glm": _all(_partial_rope, _biased(0.6)),
    "glm4": _all(_partial_rope, _biased(0.6)),
    "glm4_moe": _all(_grouped_experts, _all(use_qk_norm=_odds(0.5)), _partial_rope),
    "gpt_oss": _all(
        _window_by_layer,
        _experts("num_local_experts"),
        attention_bias=_odds(0.7),
        swiglu_limit=_of(1.0, 7.0),
    ),
    "phi": _phi,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "granitemoehybrid": _granitemoehybrid,
    "cohere": _all(
        logit_scale=_of(0.0625, 0.5, 2.0), use_qk_norm=_odds(0.5), attention_bias=_odds(0.4)
    ),
    "deepseek_v3": _deepseek_v3,
    "exaone4": _exaone4,
    "hunyuan_v1_dense": _biased(0.5),
    "arcee": _llama,
    "helium": _llama,
    "seed_oss": _all(
        _llama, attention_out_bias=_odds(0.5), attention_dropout=_of(0.0), residual_dropout=_of(0.0)
    ),
    "starcoder2": _all(_one_window, use_bias=_odds(0.5)),
}
