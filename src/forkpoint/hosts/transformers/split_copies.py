"""Copies of models that transformers splits over ranks: split over tensor-parallel ranks alone.

A copy has no data dimension, so that ranks with other rollouts can run theirs by themselves; the
ranks of one tensor-parallel group run the copy together, as they run the model. Experts that lie on
several ranks (expert parallelism) are whole in it: those ranks may have different rollouts.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from forkpoint.hosts.torch_dist.copies import copy_in, full
from forkpoint.hosts.transformers.tensor_parallel import DISPATCHED, SUMMED, Split


class TensorParts:
    """The part of each parameter that this rank has of a copy split over tensor-parallel ranks."""

    def __init__(self, model: nn.Module, splits: Sequence[Split]) -> None:
        """
        Args:
            model: the one that transformers has split, fully_shard within or not.
            splits: its split modules, by name.
        """
        self.mesh: DeviceMesh = splits[0][2].tensor_mesh
        self.group: dist.ProcessGroup = self.mesh.get_group()
        self._splits = splits
        self._ranks = _ranks_of(self.mesh)
        whole = {
            id(parameter)
            for _, module, forward in splits
            if forward.style == DISPATCHED
            for parameter in module.parameters(recurse=False)
        }
        parameters = dict(model.named_parameters())
        self._placements: dict[str, Placement | None] = {
            name: None if id(p) in whole else self._placement(p) for name, p in parameters.items()
        }
        summed = {
            id(parameter)
            for _, module, forward in splits
            if forward.style == SUMMED
            for parameter in module.parameters(recurse=False)
        }
        self.summed: frozenset[str] = frozenset(
            name for name, p in parameters.items() if id(p) in summed
        )
        """Names of parameters that every rank has whole, and whose gradients are parts."""
        self.shapes: dict[str, torch.Size] = {}
        """By name, of this rank's part; once there is a copy."""

    @property
    def split(self) -> frozenset[str]:
        """Names of parameters of which each rank has another part."""
        return frozenset(
            name
            for name, placement in self._placements.items()
            if placement is not None and not placement.is_replicate()
        )

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter or its gradient. Collective where it is held otherwise,
        over whichever ranks hold it."""
        placement = self._placements[name]
        if not isinstance(tensor, DTensor):
            return tensor
        if placement is None:
            return full(tensor)
        if tensor.device_mesh.ndim == 1 and _ranks_of(tensor.device_mesh) == self._ranks:
            if tensor.placements != (placement,):
                tensor = tensor.redistribute(placements=[placement])
            return tensor.to_local()
        found = distribute_tensor(full(tensor), self.mesh, [placement], src_data_rank=None)
        return found.to_local()

    def copy_in(
        self, model: nn.Module, blocks: nn.ModuleList, dtype: torch.dtype
    ) -> tuple[nn.Module, nn.ModuleList]:
        """Copy the model in another dtype, and name the copy's blocks. Collective."""
        kept: dict[int, Any] = {}
        for name, parameter in model.named_parameters():
            kept[id(parameter)] = self._copied(name, parameter, dtype)
        for module in model.modules():
            for value in vars(module).values():
                if isinstance(value, DeviceMesh):
                    kept[id(value)] = value
        twin, copied = copy_in(model, blocks, dtype, streamed=False, kept=kept)
        for name, _, forward in self._splits:
            module = twin.get_submodule(name)
            if forward.style == DISPATCHED:
                assert forward.expert_mesh is not None
                own: dict[str, Any] = vars(module)
                own["num_experts"] = own["num_experts"] * forward.expert_mesh.size()
                own["_is_expert_parallel"] = False
            elif forward.layer is not None:
                forward.layer.install_forward(module, self.mesh)
        return twin, copied

    def _copied(self, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        local = self.part(name, parameter.detach()).to(kind, copy=True)
        self.shapes[name] = local.shape
        placement = self._placements[name]
        if placement is not None:
            local = DTensor.from_local(
                local,
                self.mesh,
                [placement],
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return nn.Parameter(local, requires_grad=parameter.requires_grad)

    def _placement(self, parameter: nn.Parameter) -> Placement | None:
        """How a parameter lies on the tensor-parallel ranks; None where each has it whole."""
        if not isinstance(parameter, DTensor) or len(self._ranks) == 1:
            return None
        mesh = parameter.device_mesh
        for dimension, placement in enumerate(parameter.placements):
            if tuple(dist.get_process_group_ranks(mesh.get_group(dimension))) == self._ranks:
                return Replicate() if placement.is_replicate() else placement
        return None


def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(mesh.get_group()))
