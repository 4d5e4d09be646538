"""Models of a configuration with few layers, to measure what a layer takes."""

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from forkpoint.hosts.transformers.families import FAMILIES, MULTIMODAL

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


def _shallow(config: dict[str, Any], layers: int) -> dict[str, Any]:
    changed = {**config, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    changed |= dict.fromkeys(OF_TOKENS)
    if kinds := config.get("layer_types"):
        # More layers than the model has repeat its pattern.
        changed["layer_types"] = [kinds[layer % len(kinds)] for layer in range(layers)]
    return changed
