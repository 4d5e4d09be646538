"""Models of a configuration with few layers, to measure what a layer takes, or without memory, to
read their sizes."""

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from forkpoint.hosts.transformers.encoders import TransformersEncoder
from forkpoint.hosts.transformers.families import FAMILIES, MULTIMODAL
from forkpoint.plan.pricing.encoders import EncoderShape

VOCABULARY = 1024
OF_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shallow_model(
    config: dict[str, Any], layers: int, *, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """A model of few layers and few tokens of a configuration, in training mode.

    Its weights are random, and made on the device. Random number generators end as they were.

    config: the keys of a config.json. Of a multimodal model that of its language model counts.
    """
    auto: Any = AutoModelForCausalLM
    outer = config if config["model_type"] in MULTIMODAL else None
    changed = _shallow(outer["text_config"] if outer else config, layers)
    if outer and changed["model_type"] not in FAMILIES:
        # The language model has no class but the multimodal one.
        auto = AutoModelForImageTextToText
        vision = {**outer["vision_config"], "depth": 1}
        if "deepstack_visual_indexes" in vision:
            vision["deepstack_visual_indexes"] = []
        changed = {**outer, "text_config": changed, "vision_config": vision}
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        model = auto.from_config(AutoConfig.for_model(**changed), dtype=dtype)
    return model.train()


def encoder_sizes(
    config: PretrainedConfig, *, checkpointed: bool
) -> tuple[EncoderShape | None, int]:
    """Sizes of the encoder of a multimodal configuration, and how many parameters it has.

    The model is made on the device "meta": it takes no memory, and has no weights.
    """
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).train()
    if checkpointed:
        enable_checkpointing(model)
    encoder = TransformersEncoder(model)
    parameters = {p: p.numel() for m in encoder.modules for p in m.parameters(recurse=False)}
    return encoder.shape(), sum(parameters.values())


def enable_checkpointing(model: Any) -> None:
    """Let blocks keep only their inputs for their backward."""
    # Newer transformers warn of the old name; both take the same first argument.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def _shallow(config: dict[str, Any], layers: int) -> dict[str, Any]:
    changed = {**config, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    changed |= dict.fromkeys(OF_TOKENS)
    for name in ("layer_types", "no_rope_layers"):
        if kinds := config.get(name):
            # More layers than the model has repeat its pattern.
            changed[name] = [kinds[layer % len(kinds)] for layer in range(layers)]
    if mixed := config.get("moe_layers"):
        count = config["num_hidden_layers"]
        changed["moe_layers"] = [layer for layer in range(layers) if layer % count in mixed]
    if config["model_type"] == "gemma4_text":
        changed["vocab_size_per_layer_input"] = VOCABULARY
        # There may be no layers before the first that reads others' keys and values.
        changed["num_kv_shared_layers"] = 0
        changed["layer_types"][-1] = "full_attention"  # as its configuration demands
        if "per_layer_config" in config:
            wide = next(iter(config["per_layer_config"].values()), {})
            kinds = enumerate(changed["layer_types"])
            changed["per_layer_config"] = {n: wide for n, k in kinds if k == "full_attention"}
    return changed
