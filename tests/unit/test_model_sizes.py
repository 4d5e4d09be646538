"""Model configurations with values that are no sizes, in every place: refused by name."""

from typing import Any

import pytest
from test_cost import GRANITE_MICRO, QWEN35_4B
from transformers import LlamaConfig

from forkpoint import Config, ConfigError, ModelShape
from forkpoint.plan import MODELS, known_name
from forkpoint.plan.pricing.sizes import MOST_LAYERS

PLAIN: dict[str, Any] = {**MODELS["llama3-8b"], "num_hidden_layers": 2, "sliding_window": 8}
WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size")
KINDS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "experts": {**MODELS["qwen3-30b-a3b"], **dict.fromkeys(WIDTHS, 16)},
    "latent": MODELS["deepseek-v3"],
    "delta rule": QWEN35_4B,
    "Mamba-2": GRANITE_MICRO,
}
NOT_READ = ("num_experts", "num_local_experts", "tie_word_embeddings")
WRONG: tuple[Any, ...] = (
    *("8", "<b>", -1, -(10**400), 1.5, float("nan"), float("inf"), True, [8], {"a": 8}),
    *(2**31, 10**30, 10**5_000),
)


def test_what_is_missing_is_refused() -> None:
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    for name in (*needed, "intermediate_size"):
        config = {key: value for key, value in PLAIN.items() if key != name}
        with pytest.raises(ConfigError, match=f"lacks {name}"):
            ModelShape.from_config(config)
    with pytest.raises(ConfigError, match="layer_types has 1 entries"):
        ModelShape.from_config({**PLAIN, "layer_types": ["full_attention"]})


def test_a_configuration_object_is_refused_in_one_line() -> None:
    config: Any = LlamaConfig()
    with pytest.raises(ConfigError, match="of type LlamaConfig; it takes a mapping") as caught:
        ModelShape.from_config(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_size_is_refused(kind: str) -> None:
    config = KINDS[kind]
    ModelShape.from_config(config)
    for name in config.keys() - NOT_READ:
        for value in WRONG:
            with pytest.raises(ConfigError, match=name) as caught:
                ModelShape.from_config({**config, name: value})
            assert len(str(caught.value)) < 400


def test_layers_are_bounded() -> None:
    """A list of so many windows is made."""
    with pytest.raises(ConfigError, match=f"num_hidden_layers is 10001; .* at most {MOST_LAYERS}"):
        ModelShape.from_config({**PLAIN, "num_hidden_layers": MOST_LAYERS + 1})


@pytest.mark.parametrize("name", ["max_microbatch_tokens", "memory_budget", "host_memory"])
def test_options_that_numpy_cannot_count(name: str) -> None:
    Config(**{name: 2**63 - 1})
    for value in (2**63, 10**5_000):
        with pytest.raises(ConfigError, match=f"{name} is above 9223372036854775807"):
            Config(**{name: value})


def test_names_of_a_hub() -> None:
    for name in MODELS:
        assert known_name(name) == known_name(f"Someone/{name.upper()}") == name
    for name, known in {
        "Qwen/Qwen3-4B-Instruct-2507": "qwen3-4b",
        "Qwen/Qwen3-30B-A3B-Base": "qwen3-30b-a3b",
        "Qwen/Qwen2.5-Math-7B": "qwen2.5-7b",
        "meta-llama/Meta-Llama-3-8B": "llama3-8b",
        "meta-llama/Llama-3.3-70B-Instruct": "llama3-70b",
        "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b",
        "deepseek-ai/DeepSeek-R1-0528": "deepseek-v3",
    }.items():
        assert known_name(name) == known, name
    for name in (
        *("Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-9B", "Qwen/Qwen3-8B-AWQ", "Qwen3", ""),
        *("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"),
        *("mistralai/Mistral-7B-v0.1", "meta-llama/Llama-2-7b-hf"),
    ):
        assert known_name(name) is None, f"{name} has other sizes"
