"""Models that transformers splits over ranks (tensor and expert parallelism), also within
fully_shard.

The model's own code runs on every rank, and issues the collectives that its splits need. What a
step adds is this. Ranks of one tensor-parallel group have the same batch, and are counted once.
Parameters that each of them has whole, and uses for its own heads alone, have gradients that are
parts; transformers sums these in every backward, which with several backwards counts the first ones
again. Here they are summed once, after the last one.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from forkpoint.config import Gather
from forkpoint.engine.changes import Changes
from forkpoint.engine.distributed import Distributed
from forkpoint.engine.guard import local
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.hosts.distributed import FullySharded, buckets, distributed, unwrapped
from forkpoint.hosts.parallel_forwards import (
    SUMMED,
    ParallelForward,
    parallel_modules,
    sums_in_every_backward,
)
from forkpoint.parallel.ranks import DataRanks, ranks_of

LEAST_VERSION = (5, 23)
"""Of transformers, from which on models that it splits have been shown exact."""
Split = tuple[str, nn.Module, ParallelForward]


def held_by_ranks(model: nn.Module, mesh: DeviceMesh | None) -> Distributed | None:
    """The wrapper or the split that holds the model on several ranks; None where there is none.

    Collective where something does. Raises UnsupportedError for what has not been shown exact, and
    ConfigError for a mesh that is not the model's.
    """
    splits = parallel_modules(unwrapped(model))
    if splits:
        check_version(transformers.__version__)
    if splits and type(model) is DistributedDataParallel:
        raise UnsupportedError(
            "DistributedDataParallel holds a model that transformers has split over ranks, which "
            "has not been shown exact. Use fully_shard for the data dimension: "
            "DistributedConfig(tp_size=..., fsdp_size=...)."
        )
    if splits:
        check_stages(unwrapped(model))
        check_widths(splits)
        found: Distributed | None = ModelParallel(model, splits)
    else:
        found = distributed(model)
    if mesh is not None:
        check_mesh(mesh, found)
    return found


class ModelParallel:
    """transformers' tensor and expert parallelism, with fully_shard over data ranks or alone."""

    lockstep: bool = True
    gathers: bool = False
    gathered: bool = False
    listens: bool = False

    def __init__(self, model: nn.Module, splits: Sequence[Split]) -> None:
        """Collective over the default group."""
        self.splits: tuple[Split, ...] = tuple(splits)
        tensor = {_members(forward.tensor_mesh) for _, _, forward in splits}
        expert = {_members(f.expert_mesh) for _, _, f in splits if f.expert_mesh is not None}
        for what, groups in (("tensor", tensor), ("expert", expert)):
            if len(groups) > 1:
                raise UnsupportedError(
                    f"modules of the model are split over different {what}-parallel groups of "
                    f"ranks ({', '.join(map(str, sorted(groups)))}), which has not been shown "
                    "exact. Split all of them over one mesh dimension."
                )
        self.tensor_group: dist.ProcessGroup = splits[0][2].tensor_mesh.get_group()
        self.tensor_ranks: tuple[int, ...] = next(iter(tensor))
        self.expert_ranks: tuple[int, ...] = next(iter(expert), (dist.get_rank(),))
        self.data: FullySharded | None = None
        sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
        if sharded:
            experts = {m for _, m, f in splits if f.expert_mesh is not None}
            found = distributed(model, experts)
            assert isinstance(found, FullySharded)
            self.data = found
        self._factors: dict[nn.Parameter, float] = {}
        self.reduces: bool = self.data is not None
        self.param_dtypes: frozenset[torch.dtype] = (
            frozenset() if self.data is None else self.data.param_dtypes
        )
        self.data_ranks: tuple[int, ...] = (
            (dist.get_rank(),) if self.data is None else self.data.ranks.global_ranks
        )
        self.ranks: DataRanks = _all_ranks(self.data_ranks, self.tensor_ranks, self.expert_ranks)

    @property
    def meshes(self) -> Sequence[DeviceMesh]:
        data = () if self.data is None else self.data.meshes
        return (self.splits[0][2].tensor_mesh, *data)

    def check(self, model: nn.Module, *, training: bool) -> None:
        if self.data is not None:
            self.data.check(model, training=training)

    def _summed(self) -> set[nn.Parameter]:
        """Parameters whose gradients are parts on each rank of the tensor-parallel group."""
        modules = (module for _, module, forward in self.splits if forward.style == SUMMED)
        return {parameter for module in modules for parameter in module.parameters(recurse=False)}

    def apart(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        after = {*self._summed(), *self._divided()}
        return [parameter for parameter in parameters if parameter in after]

    def _divided(self) -> dict[nn.Parameter, float]:
        """Parameters of experts that lie on this rank alone, and what divides their gradients."""
        unshared = [] if self.data is None else self.data.unshared()
        return {p: factor for module, factor in unshared for p in module.parameters(recurse=False)}

    def factor(self, *, mean: bool) -> float:
        return 1.0 if self.data is None else self.data.factor(mean=mean)

    def use(self, gather: Gather, changes: Changes) -> None:
        assert gather == "microbatch", "the model's own collectives lie within forwards"
        if self.data is not None:
            self.data.use(gather, changes)

    def held_bytes(self, gather: Gather) -> int:
        return 0 if self.data is None else self.data.held_bytes(gather)

    def missing_bytes(self) -> int:
        return 0 if self.data is None else self.data.missing_bytes()

    def whole_parameters(self) -> Iterable[nn.Parameter]:
        return () if self.data is None else self.data.whole_parameters()

    def reduce_held(self) -> None:
        pass

    def reduce_earlier(self) -> None:
        if self.data is not None:
            self.data.reduce_earlier()

    def enter(self, changes: Changes, blocks: Sequence[nn.Module]) -> None:
        # Those of this moment: within the step all factors are one.
        self._factors = self._divided()
        if self.data is not None:
            self.data.enter(changes, blocks)
            for module, factor in self.data.unshared():
                sharded = cast(FSDPModule, module)
                changes.later(sharded.set_gradient_divide_factor, factor)
                sharded.set_gradient_divide_factor(1.0)
        # In place of the forward that gives the parameters hooks, and of hooks from before.
        for _, module, forward in self.splits:
            if forward.style == SUMMED:
                changes.replace_forward(module, forward.own)
        for parameter in (*self._summed(), *self.whole_parameters()):
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            for key, hook in list(hooks.items()):
                if sums_in_every_backward(hook):
                    changes.later(hooks.__setitem__, key, hook)
                    del hooks[key]

    def last(self) -> None:
        if self.data is not None:
            self.data.last()

    def reduce(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter], *, mean: bool
    ) -> list[Tensor | None]:
        summed = self._summed()
        parts = [
            local(gradient).detach()
            for gradient, parameter in zip(gradients, parameters, strict=True)
            if gradient is not None and parameter in summed
        ]
        for bucket in buckets(parts):
            flat = torch.cat([part.reshape(-1) for part in bucket])
            dist.all_reduce(flat, group=self.tensor_group)
            for part, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                part.copy_(total.view_as(part))
        for gradient, parameter in zip(gradients, parameters, strict=True):
            if gradient is not None and parameter in self._factors:
                local(gradient).detach().div_(self._factors[parameter])
        return list(gradients)

    def add_up(self, tensor: Tensor) -> None:
        if self.data is not None:
            self.data.add_up(tensor)

    def settle(self) -> None:
        if self.data is not None:
            self.data.settle()

    def reset(self, *, lost: bool) -> None:
        if self.data is not None:
            self.data.reset(lost=lost)


def _members(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(mesh.get_group()))


def _all_ranks(*own: tuple[int, ...]) -> DataRanks:
    """The ranks that step together: those that groups of ranks connect. Collective.

    own: this rank's groups of data, tensor and expert parallelism.
    """
    found: list[tuple[tuple[int, ...], ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own, group=dist.new_group(backend="gloo"))
    groups = [each for each in found if each is not None]
    members, todo = set(), [dist.get_rank()]
    while todo:
        rank = todo.pop()
        if rank not in members:
            members.add(rank)
            todo += [other for group in groups[rank] for other in group]
    ordered = tuple(sorted(members))
    # Ranks of one tensor-parallel group have one batch. Batches are in the order of data ranks.
    firsts = sorted({min(groups[rank][1]) for rank in ordered})
    return ranks_of(ordered, tuple(firsts.index(min(groups[rank][1])) for rank in ordered))


def check_version(found: str) -> None:
    """The version of transformers splits models as the one does that has been shown exact.

    Raises UnsupportedError.
    """
    parts = found.split(".")[:2]
    if all(map(str.isdigit, parts)) and tuple(map(int, parts)) < LEAST_VERSION:
        raise UnsupportedError(
            f"transformers {found} has split the model over ranks; such models have been shown "
            "exact with 5.23, and earlier versions split them otherwise. Update transformers."
        )


def check_stages(model: nn.Module) -> None:
    """The model is not split into stages as well.

    Raises UnsupportedError.
    """
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    stages = getattr(config, "pp_size", None) or 1
    if stages > 1:
        raise UnsupportedError(
            f"the model is split into {stages} pipeline stages (pp_size), which has not been shown "
            "exact. Load it with pp_size=1."
        )


def check_widths(splits: Sequence[Split]) -> None:
    """Linear layers know the whole width of their inputs, which transformers' forwards rely on.

    Raises UnsupportedError.
    """
    for name, module, _ in splits:
        if isinstance(module, nn.Linear):
            width, whole = module.in_features, module.weight.shape[1]
            if width != whole:
                raise UnsupportedError(
                    f"{name} has in_features {width}, and its weight, over all ranks, takes "
                    f"{whole}: transformers takes the first for the whole and fails at its inputs. "
                    "peft makes such adapters of layers that are split by their inputs (o_proj, "
                    "down_proj). Leave these out of target_modules."
                )


def check_compile_blocks(asked: bool | None) -> bool:
    """Blocks of split models run eagerly; by default they do.

    Raises UnsupportedError where they are to be compiled.
    """
    if asked:
        raise UnsupportedError(
            "Config(compile_blocks=True) asks for compiled decoder blocks, which have not been "
            "shown exact where transformers splits them over ranks. Leave compile_blocks out."
        )
    return False


def check_mesh(mesh: DeviceMesh, found: Distributed | None) -> None:
    """The mesh that the caller names is the one that the model is held over.

    Raises ConfigError.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names is None:
        raise ConfigError(
            f"mesh is a {type(mesh).__name__} without names of its dimensions; it takes the "
            "DeviceMesh that the model was split over, made with mesh_dim_names."
        )
    held: dict[str, tuple[int, ...]] = {}
    if isinstance(found, ModelParallel):
        held = {"tensor": found.tensor_ranks, "expert": found.expert_ranks}
        held["data"] = found.data_ranks
    elif found is not None:
        held = {"data": found.ranks.global_ranks}
    for name in mesh.mesh_dim_names:
        ranks = _members(mesh[name])
        if len(ranks) == 1:
            continue
        # The names that transformers gives; any other is a data dimension's.
        kind = {"tp": "tensor", "ep": "expert"}.get(name)
        kinds = (kind,) if kind else tuple(held)
        if any(set(ranks) <= set(held.get(each, ())) for each in kinds):
            continue
        what = f"{kind} parallelism" if kind else "any parallelism"
        raise ConfigError(
            f"the mesh's dimension {name!r} has the ranks {list(ranks)}, and the model is not held "
            f"over them by {what}: found are "
            f"{', '.join(f'{k} over ranks {list(r)}' for k, r in held.items()) or 'none'}. Split "
            "the model over this mesh (DistributedConfig, fully_shard) before it is wrapped, or "
            "leave mesh out."
        )
