"""Gradients that nothing reduces over ranks: what can be seen of that before the first of them."""

import gc
import logging

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forkpoint.engine.distributed import Distributed
from forkpoint.errors import UnsupportedError

_log = logging.getLogger("forkpoint")
_warned: set[str] = set()
"""Warnings that this process has given."""
NOT_HELD = (
    "rank %d trains a model that nothing holds over the %d ranks of the process group, so its "
    "gradients are not reduced. If the ranks train one model, call forkpoint.wrap with the "
    "DistributedDataParallel itself, or after fully_shard; if each trains another, ignore this."
)
NOT_COVERED = (
    "rank %d: gradients are not reduced over dimension %r of the model's device mesh (ranks %s): "
    "neither the wrapper nor a split of the model has it. If these ranks train one model on "
    "different rollouts, call fully_shard with a mesh that has the dimension."
)


def check_reduced(model: nn.Module, group: Distributed | None) -> None:
    """Warn, once in a process, of ranks over which gradients of the model are not reduced.

    Independent models on ranks are legitimate, so that this is no error. Raises UnsupportedError
    where a DistributedDataParallel has the model, and `group` is not made of it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if group is not None:
        _check_meshes(group)
        return
    for found in gc.get_objects():
        if not issubclass(type(found), DistributedDataParallel):
            continue
        if found.process_group.size() > 1 and model in set(found.module.modules()):
            raise UnsupportedError(
                "DistributedDataParallel holds this model, and the policy was made of the model "
                "within it, so that gradients of a step would not be reduced over ranks. Make the "
                "policy of the DistributedDataParallel: forkpoint.wrap(ddp_model)."
            )
    _warn(NOT_HELD, dist.get_rank(), dist.get_world_size())


def _check_meshes(group: Distributed) -> None:
    """Every dimension of the whole mesh, of which the model's is a part, is held."""
    for mesh in group.meshes:
        whole = mesh._get_root_mesh()
        place = whole.get_coordinate()
        assert place is not None, "the rank is in a part of the mesh"
        names = whole.mesh_dim_names or tuple(map(str, range(whole.ndim)))
        for dimension, name in enumerate(names):
            index = (*place[:dimension], slice(None), *place[dimension + 1 :])
            ranks = whole.mesh[index].tolist()
            if not set(ranks) <= {dist.get_rank(), *group.ranks.global_ranks}:
                _warn(NOT_COVERED, dist.get_rank(), name, ranks)


def _warn(text: str, *values: object) -> None:
    if text not in _warned:
        _warned.add(text)
        _log.warning(text, *values)
