"""Models of a configuration with few layers, to measure what a layer takes."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 1024
OF_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shallow_model(
    config: dict[str, Any], layers: int, *, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """A model of few layers and few tokens of a configuration, in training mode.

    Its weights are random, and made on the device. Random number generators end as they were.

    config: the keys of a config.json.
    """
    changed = {**config, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    changed |= dict.fromkeys(OF_TOKENS)
    if config.get("layer_types"):
        changed["layer_types"] = config["layer_types"][:layers]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**changed), dtype=dtype)
    return model.train()
