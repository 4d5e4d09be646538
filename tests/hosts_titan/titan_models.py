"""Tiny models of torchtitan, of the version that is installed."""

from importlib.metadata import version
from typing import Any

import torch
from torch import nn

V03 = version("torchtitan").startswith("0.3")
if V03:
    from titan_models_03 import BIAS, FLEX, HEAD, balancing_optimizer, build, checkpoint_fully
else:
    from titan_models_02 import BIAS, FLEX, HEAD, balancing_optimizer, build, checkpoint_fully

__all__ = [
    "BIAS",
    "FLEX",
    "HEAD",
    "V03",
    "balancing_optimizer",
    "checkpoint_fully",
    "own_name",
    "titan_model",
]


def own_name(name: str) -> str:
    """The name of a parameter without wrappers for activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def titan_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any
) -> nn.Module:
    """A random model of a family: 3 layers, 4 query and 2 key-value heads."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = build(family, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            # The usual initialisation is so small that attention is uniform and norms are all one.
            noise = torch.randn(parameter.shape) * 0.3
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    torch.set_rng_state(state)
    for parameter in model.parameters():  # rotary embeddings keep their dtype
        parameter.data = parameter.data.to(dtype)
    return model
