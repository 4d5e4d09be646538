"""torchtitan's Trainer on CPUs, within a process group that exists already."""

import os
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components import metrics
from torchtitan.config import ConfigManager
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils

MODULE = SimpleNamespace(
    **{name: lambda *_, **__: None for name in ("set_device", "empty_cache", "synchronize")},
    reset_peak_memory_stats=lambda *_: None,
    get_device_name=lambda *_: "CPU",
    current_device=lambda: 0,
    get_device_properties=lambda *_: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda *_: {},
)


def on_cpus() -> None:
    """Let torchtitan take the CPU for its device."""
    for module in (utils, metrics, parallel_dims, dist_utils):
        vars(module).update(device_type="cpu", device_module=MODULE)
    dist_utils.init_distributed = lambda *_, **__: dist.get_world_size()
    dist_utils.set_pg_timeouts = lambda *_, **__: None
    os.environ["LOCAL_RANK"] = "0"
    warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype", UserWarning)
    warnings.filterwarnings("ignore", "DTensor .* may not have complete", UserWarning)


def run(trainer_class: Any, *arguments: str) -> tuple[list[torch.Tensor], Any]:
    """Train with these arguments of torchtitan's command; whole weights, and the trainer."""
    on_cpus()
    trainer = trainer_class(ConfigManager().parse_args(list(arguments)))
    model: nn.Module = trainer.model_parts[0]
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sums
    trainer.train()
    weights = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return [weight.detach() for weight in weights], trainer
