"""Reads the ranks that hold a model from the model and its device meshes.

The holders of the model are read once. Mesh dimensions without a holder are refused. If there is no
mesh and no holder, a warning is logged before the first gradients.
"""

import gc
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from forkpoint.engine.distributed import Distributed, Holder
from forkpoint.errors import ConfigError, RankError, UnsupportedError
from forkpoint.hosts.refusals import has_trainable
from forkpoint.hosts.torch_dist.context_parallel import NAMES, context_split
from forkpoint.hosts.torch_dist.fully_sharded import FullySharded
from forkpoint.hosts.torch_dist.replicated import FrozenReplicas, Replicated
from forkpoint.hosts.torch_dist.stages import DIMENSION, StageRanks, has_stages
from forkpoint.parallel.process_groups import exchange_with_all, process_group
from forkpoint.parallel.ranks import ranks_of
from forkpoint.parallel.topology import PaddedPlaces, Relation, Topology, connected, partition

_log = logging.getLogger("forkpoint")
_warned = False
"""Whether this process has logged `NOT_HELD`."""
NOT_HELD = (
    "rank %d trains a model that is not distributed over the %d ranks of the process group, so its "
    "gradients are not reduced. If the ranks train one model, call forkpoint.wrap with the "
    "DistributedDataParallel itself, or after fully_shard; if each trains another, ignore this."
)


def held_by_ranks(
    model: nn.Module, mesh: DeviceMesh | None, split_of: Callable[[nn.Module], Holder | None]
) -> tuple[Distributed, StageRanks | None]:
    """Find the holders of a model on several ranks, and the ranks of its stages. There are none if
    only this rank holds the model.

    Args:
        split_of: returns the holder of modules that the model's library has split over ranks.

    Collective over the default group if there is a holder. Raises UnsupportedError for parallelism
    that has not been shown exact.
    """
    holders, stages = holders_of(model, split_of), None
    if has_stages(mesh):
        stages = StageRanks(mesh[DIMENSION])
        replicas = _replicas(mesh)
        held = any("data" in holder.relations for holder in holders)
        if len(replicas) > 1 and not held and not has_trainable(model):
            holders.append(FrozenReplicas(replicas))
    context = context_split(mesh, holders)
    if context is not None:
        holders.append(context)
    if stages is not None:
        holders.append(stages)
    found = Distributed()
    if holders:
        topology = read_topology(holders, next(model.parameters()).device)
        if context is not None:
            topology = replace(topology, places=context.places)
        elif topology.length_multiple > 1:
            topology = replace(topology, places=PaddedPlaces(topology.length_multiple))
        found = Distributed(holders, topology, ranks_of(topology.members, topology.batches))
    return found, stages


def _replicas(mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of a mesh that have the same part of the model as this rank."""
    place = mesh.get_coordinate()
    assert place is not None and mesh.mesh_dim_names is not None
    index = tuple(
        at if name in (DIMENSION, "tp") else slice(None)
        for name, at in zip(mesh.mesh_dim_names, place, strict=True)
    )
    return tuple(mesh.mesh[index].flatten().tolist())


def holders_of(model: nn.Module, split_of: Callable[[nn.Module], Holder | None]) -> list[Holder]:
    """The holders of a model: wrappers of the data dimension, then splits of its library."""
    split = split_of(unwrapped(model))
    if split is None:
        found = _data_holder(model)
        return [] if found is None else [found]
    if type(model) is DistributedDataParallel:
        raise UnsupportedError(
            "DistributedDataParallel holds a model whose modules are split over ranks, which has "
            "not been shown exact. Use fully_shard for the data dimension."
        )
    found = _data_holder(model, split.experts)
    return [split] if found is None else [found, split]


def read_topology(holders: Sequence[Holder], device: torch.device) -> Topology:
    """Read the topology of a model's holders, and make its process groups. Collective over the
    default group.

    Args:
        device: device of the model.

    Raises RankError, on all ranks, if ranks wrap models that are held by different ranks.
    """
    relations: dict[Relation, tuple[int, ...]] = {}
    for holder in holders:
        relations.update(holder.relations)
    groups = [ranks for holder in holders for ranks in holder.process_groups]
    found = exchange_with_all((relations, groups, device.type))
    every = {number: connections for number, (connections, _, _) in enumerate(found)}
    _check_relations(every)
    wanted = {(ranks, "gloo") for ranks in partition(every)}
    wanted |= {(ranks, None) for _, groups, _ in found for ranks in groups}
    for ranks in partition(every):
        batches = set(connected(every, ranks[0])[1])
        if 1 < len(ranks) == len(batches) and any(found[one][2] != "cpu" for one in ranks):
            wanted.add((ranks, None))  # for exchanged prompts (`DataRanks.group_of`)
    # torch requires that all ranks of the default group make groups in the same order.
    for ranks, backend in sorted(wanted, key=str):
        process_group(ranks, backend)
    members, batches = connected(every, dist.get_rank())
    return Topology(
        relations,
        members,
        batches,
        lockstep=any(holder.lockstep for holder in holders),
        gathers=all(holder.gathers for holder in holders),
        reduces=any(holder.reduces for holder in holders),
        listens=any(holder.listens for holder in holders),
        length_multiple=math.lcm(*(holder.length_multiple for holder in holders)),
    )


def _check_relations(every: Mapping[int, Mapping[Relation, tuple[int, ...]]]) -> None:
    """Raise RankError if a rank holds its model together with a rank that does not wrap that
    model."""
    for rank, relations in every.items():
        for kind, ranks in relations.items():
            for other in ranks:
                if (held := every[other].get(kind)) != ranks:
                    raise RankError(
                        f"rank {rank} wraps a model with {kind} parallelism over ranks "
                        f"{list(ranks)}, and rank {other} wraps one with {kind} parallelism over "
                        f"{f'ranks {list(held)}' if held else 'no ranks'}. At each "
                        "call of forkpoint.wrap, these ranks must wrap their parts of the same "
                        "model. Wrap models in the same order on all ranks."
                    )


REFUSED = {
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "it flattens parameters, so gradients of single parameters do not exist. Use torch's "
        "fully_shard (FSDP2), in accelerate fsdp_version: 2"
    ),
    "deepspeed.runtime.engine.DeepSpeedEngine": (
        "its hooks reduce and partition gradients. Use torch's fully_shard (FSDP2)"
    ),
}
"""Reason and remedy, by refused class."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel; other models unchanged.

    Raises UnsupportedError for wrappers that have not been shown exact.
    """
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    for base in type(model).__mro__:
        why = REFUSED.get(f"{base.__module__}.{base.__qualname__}")
        if why is not None:
            raise UnsupportedError(f"{kind} has not been shown exact: {why}.")
    return model.module if type(model) is DistributedDataParallel else model


def _data_holder(model: nn.Module, experts: Collection[nn.Module] = ()) -> Holder | None:
    """The holder for the data-parallel wrapper of a model; None without a wrapper.

    `experts`: modules that are sharded over a separate mesh. Raises UnsupportedError for wrappers
    that have not been shown exact.
    """
    if type(model) is DistributedDataParallel:
        return Replicated(model)
    sharded = [(name, m) for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    if not sharded:
        return None
    if not isinstance(model, FSDPModule):
        raise UnsupportedError(
            f"{sharded[0][0]} is sharded by fully_shard and the model around it is not, so "
            "gradients of its other parameters would not be reduced over ranks. Call "
            "fully_shard(model) as well, after its blocks."
        )
    return FullySharded(model, experts)


def check_meshes(group: Distributed, mesh: DeviceMesh | None) -> None:
    """Raise ConfigError or UnsupportedError unless a model has a holder for every dimension of the
    caller's mesh and of its own meshes."""
    for holder in group.parts:
        for each in holder.meshes:
            _check_root_mesh(each, group.topology)
    if mesh is not None:
        _check_mesh(mesh, group.topology)


def _check_mesh(mesh: DeviceMesh, topology: Topology) -> None:
    """Raise ConfigError unless the model has a holder for every dimension of the caller's mesh."""
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names is None:
        raise ConfigError(
            f"mesh is a {type(mesh).__name__} without names of its dimensions; it takes the "
            "DeviceMesh that the model was split over, made with mesh_dim_names."
        )
    held: dict[str, tuple[int, ...]] = {**topology.relations}
    for name, ranks in _dimensions(mesh):
        # Names that transformers and torchtitan use. Any other dimension is taken for data
        # parallelism.
        kind = {
            "tp": "tensor",
            "ep": "expert",
            "pp": "stage",
            **dict.fromkeys(NAMES, "context"),
        }.get(name)
        named = [kind] if kind else list(held)
        if not any(set(ranks) <= set(held.get(each, ())) for each in named):
            found = ", ".join(f"{k} over ranks {list(r)}" for k, r in held.items()) or "none"
            raise ConfigError(
                f"the mesh's dimension {name!r} has the ranks {ranks}, and the model has no "
                f"{f'{kind} ' if kind else ''}parallelism over them (found: {found}). Split the "
                "model over this mesh (DistributedConfig, fully_shard), or leave mesh out."
            )


def _check_root_mesh(mesh: DeviceMesh, topology: Topology) -> None:
    """Raise UnsupportedError if the root of a model's mesh has a dimension without a holder."""
    for name, ranks in _dimensions(mesh._get_root_mesh()):
        if not set(ranks) <= set(topology.members):
            raise UnsupportedError(
                f"dimension {name!r} of the model's device mesh has the ranks {ranks}, and nothing "
                "holds the model over them, so its gradients would not be reduced. Call "
                "fully_shard with a mesh that has the dimension, or make a mesh without it."
            )


def _dimensions(mesh: DeviceMesh) -> Iterator[tuple[str, list[int]]]:
    """The dimensions of a mesh with several ranks, and for each the ranks of this rank's group."""
    place = mesh.get_coordinate()
    assert place is not None, "the rank is in a part of the mesh"
    for dimension, name in enumerate(mesh.mesh_dim_names or map(str, range(mesh.ndim))):
        index = (*place[:dimension], slice(None), *place[dimension + 1 :])
        ranks = mesh.mesh[index].tolist()
        if len(ranks) > 1:
            yield name, ranks


def check_reduced(model: nn.Module, group: Distributed) -> None:
    """Warn once in a process if gradients of the model are not reduced over ranks.

    This is no error, because ranks may train independent models. Raises UnsupportedError if a
    DistributedDataParallel holds the model, and the policy was made from the model inside it.
    """
    global _warned
    if not group.ranks.is_alone or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for found in gc.get_objects():
        if not issubclass(type(found), DistributedDataParallel):
            continue
        if found.process_group.size() > 1 and model in set(found.module.modules()):
            raise UnsupportedError(
                "DistributedDataParallel holds this model, and the policy was made from the model "
                "inside it, so gradients of a step would not be reduced over ranks. Make the "
                "policy from the DistributedDataParallel: forkpoint.wrap(ddp_model)."
            )
    if not _warned:
        _warned = True
        _log.warning(NOT_HELD, dist.get_rank(), dist.get_world_size())
