"""Models of published shapes on several ranks, with random weights."""

import torch
from torch import nn
from transformers.distributed.configuration_utils import DistributedConfig

from benchmarks.ranks.team import Team
from benchmarks.shapes import make_model
from forkpoint.apps.cli.torchrun import sharded

CHECKED_LAYERS = 2
"""Layers of the models that are compared with ordinary training."""


def whole(team: Team, shape: str, layers: int | None, dtype: torch.dtype) -> nn.Module:
    """The model on each rank by itself."""
    return make_model(shape, team.device, dtype=dtype, layers=layers)


def fully_sharded(team: Team, shape: str, layers: int | None, dtype: torch.dtype) -> nn.Module:
    """The model, sharded by fully_shard over all ranks."""
    model = sharded(make_model(shape, team.device, dtype=dtype, layers=layers))
    team.free()
    return model


def tensor_split(team: Team, shape: str, layers: int | None, dtype: torch.dtype) -> nn.Module:
    """The model, split by tensor parallelism over all ranks."""
    model = make_model(shape, team.device, dtype=dtype, layers=layers)
    config, _, meshes = model.prepare_distribute_model(DistributedConfig(tp_size=team.size))
    split = model.maybe_distribute_model(model, config, meshes)
    team.free()
    return split
