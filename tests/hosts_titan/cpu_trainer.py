"""torchtitan's Trainer on CPUs, within a process group that exists already."""

import os
import sys
import zlib
from typing import Any

import torch
import torch.distributed as dist
from titan_models import V03, own_name
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.distributed import utils as dist_utils

from benchmarks.ranks.titan import DEVICE, on_cpus, without_scaled_sums

if V03:
    from cpu_trainer_03 import make_trainer
else:
    from cpu_trainer_02 import make_trainer


@torch.no_grad()
def set_weights(model: nn.Module) -> None:
    """Weights by name: torchtitan draws others on stages of a pipeline."""
    for name, parameter in model.named_parameters():
        draw = torch.Generator().manual_seed(zlib.crc32(own_name(name).encode()))
        noise = torch.randn(parameter.shape, generator=draw) * 0.1
        value = noise if parameter.dim() > 1 else 1 + noise
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        parameter.copy_(value)


def run(trainer_class: Any, folder: str, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Train with these options of `make_trainer`; whole weights of this rank's stage by name, and
    the trainer."""
    on_cpus()
    for name, module in list(sys.modules.items()):  # 0.3 has them in more modules
        if name.startswith("torchtitan.") and "device_type" in vars(module):
            vars(module)["device_type"] = "cpu"
            if "device_module" in vars(module):
                vars(module)["device_module"] = DEVICE
    dist_utils.init_distributed = lambda *_, **__: dist.get_world_size()
    dist_utils.set_pg_timeouts = lambda *_, **__: None
    os.environ["LOCAL_RANK"] = "0"
    trainer = make_trainer(trainer_class, folder, **options)
    model: nn.Module = trainer.model_parts[0]
    without_scaled_sums(model)
    set_weights(model)
    trainer.train()
    weights = {}
    for name, parameter in model.named_parameters():
        whole = getattr(parameter, "full_tensor", lambda p=parameter: p)()
        weights[own_name(name)] = whole.detach()
    return weights, trainer
