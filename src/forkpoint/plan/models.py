"""Sizes of common models, for counts without their configuration files. Imports no torch.

Each entry has the values of the published config.json, by transformers' names.
"""

import re
from typing import Any


def _config(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, inter: int, vocab: int
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inter,
        "vocab_size": vocab,
    }


def _experts(config: dict[str, Any], width: int, used: int, count: int) -> dict[str, Any]:
    return {
        **config,
        "moe_intermediate_size": width,
        "num_experts_per_tok": used,
        "num_experts": count,
    }


def _tied(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "tie_word_embeddings": True}


MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _tied(_config(28, 1024, 16, 8, 128, 3072, 151936)),
    "qwen3-1.7b": _tied(_config(28, 2048, 16, 8, 128, 6144, 151936)),
    "qwen3-4b": _tied(_config(36, 2560, 32, 8, 128, 9728, 151936)),
    "qwen3-8b": _config(36, 4096, 32, 8, 128, 12288, 151936),
    "qwen3-14b": _config(40, 5120, 40, 8, 128, 17408, 151936),
    "qwen3-32b": _config(64, 5120, 64, 8, 128, 25600, 151936),
    "qwen3-30b-a3b": _experts(_config(48, 2048, 32, 4, 128, 6144, 151936), 768, 8, 128),
    "qwen3-235b-a22b": _experts(_config(94, 4096, 64, 4, 128, 12288, 151936), 1536, 8, 128),
    "qwen2.5-0.5b": _tied(_config(24, 896, 14, 2, 64, 4864, 151936)),
    "qwen2.5-1.5b": _tied(_config(28, 1536, 12, 2, 128, 8960, 151936)),
    "qwen2.5-3b": _tied(_config(36, 2048, 16, 2, 128, 11008, 151936)),
    "qwen2.5-7b": _config(28, 3584, 28, 4, 128, 18944, 152064),
    "qwen2.5-14b": _config(48, 5120, 40, 8, 128, 13824, 152064),
    "qwen2.5-32b": _config(64, 5120, 40, 8, 128, 27648, 152064),
    "qwen2.5-72b": _config(80, 8192, 64, 8, 128, 29568, 152064),
    "llama3.2-1b": _tied(_config(16, 2048, 32, 8, 64, 8192, 128256)),
    "llama3.2-3b": _tied(_config(28, 3072, 24, 8, 128, 8192, 128256)),
    "llama3-8b": _config(32, 4096, 32, 8, 128, 14336, 128256),
    "llama3-70b": _config(80, 8192, 64, 8, 128, 28672, 128256),
    "llama3-405b": _config(126, 16384, 128, 8, 128, 53248, 128256),
    "mistral-7b": _config(32, 4096, 32, 8, 128, 14336, 32768),
    "deepseek-v3": {
        **_experts(_config(61, 7168, 128, 128, 192, 18432, 129280), 2048, 8, 256),
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
"""Configurations by the names that the command line takes."""

# Parts of names on a hub that do not change sizes: who tuned the model, how, and when.
_TUNED = re.compile(
    r"-(instruct|base|chat|hf|it|thinking|preview|coder|math|reasoning|\d{4}|v0\.3)(?=-|$)"
)
_SAME_SIZES = (
    # Llama 3, 3.1 and 3.3, with or without Meta's name, have equal sizes.
    (re.compile(r"^(?:meta-)?llama-?3(?:[.-][13])?-(8b|70b|405b)$"), r"llama3-\1"),
    (re.compile(r"^(?:meta-)?llama-?3[.-]2-(1b|3b)$"), r"llama3.2-\1"),
    (re.compile(r"^qwen-?(3|2\.5)-(.+)$"), r"qwen\1-\2"),
    (re.compile(r"^deepseek-(?:v3(?:\.1)?|r1)(?:-zero)?$"), "deepseek-v3"),
)


def known_name(name: str) -> str | None:
    """The name in `MODELS` of a model with equal sizes; None if there is none.

    `name` is a name on a hub, in upper or lower case: "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.1-8B-Instruct". Only parts that do not change sizes are ignored, so names of
    other models, such as distilled or quantized ones, are not known.
    """
    word = _TUNED.sub("", name.strip().lower().rstrip("/").rpartition("/")[2])
    for pattern, plain in _SAME_SIZES:
        word = pattern.sub(plain, word)
    return word if word in MODELS else None
