"""Models of transformers on ranks of pipeline, data, context, tensor and expert parallelism.

transformers makes meshes of all ranks alone; here it is given those of one stage.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

import forkpoint


class Meshes:
    """The meshes of all ranks: (pp, dp, cp, tp), and (pp, efsdp, ep) of experts."""

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        pp: int = 1,
        dp: int = 1,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
    ) -> None:
        """Collective over the default group.

        Args:
            device: this rank's; a CPU by default.
            pp, dp, cp, tp, ep: ranks of each kind of parallelism.
        """
        self.device: torch.device = device or torch.device("cpu")
        kind = self.device.type
        dense, expert = (pp, dp, cp, tp), (pp, dp * cp * tp // ep, ep)
        names = ("pp", "dp", "cp", "tp")
        self.dense: DeviceMesh = init_device_mesh(kind, dense, mesh_dim_names=names)
        names = ("pp", "efsdp", "ep")
        self.expert: DeviceMesh = init_device_mesh(kind, expert, mesh_dim_names=names)

    def get_mesh(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        """As transformers asks for it."""
        if dims == ("pp", "fsdp", "tp"):
            return self.dense["pp", "dp", "tp"]
        return (self.expert if dims == "ep" else self.dense)[dims]

    @contextmanager
    def given_to_transformers(self) -> Iterator[None]:
        """Within it `from_pretrained` splits a model over these meshes, if DistributedConfig
        asks for splits."""

        def prepare(cls: Any, config: Any, device_map: Any = None) -> Any:
            if config is None:
                return None, device_map, None
            return config, None if self.device.type == "cpu" else self.device, self

        with patch.object(PreTrainedModel, "prepare_distribute_model", classmethod(prepare)):
            yield

    def sharded(self, model: Any) -> nn.Module:
        """A stage of a model, whose weights ranks with other tokens hold by fully_shard."""
        forkpoint.cut(model, self.dense)
        data = self.dense["dp", "cp"]._flatten("data")
        for block in model.model.layers:
            if not any(True for _ in block.parameters()):
                continue  # of another stage
            if self.expert["ep"].size() > 1:
                experts: Any = fully_shard(block.mlp.experts, mesh=self.expert["efsdp"])
                experts.set_gradient_divide_factor(float(data.size()))
                experts.set_force_sum_reduction_for_comms(True)
            fully_shard(block, mesh=data)
        return fully_shard(model, mesh=data)
