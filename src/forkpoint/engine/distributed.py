"""Holders of a model on several ranks: fully_shard, DistributedDataParallel, or modules split over
ranks. If a model has several holders, the engine uses one holder (`Distributed`) that calls
them."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from forkpoint.config import Gather
from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.parallel.ranks import DataRanks
from forkpoint.parallel.topology import Relation, Topology


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; other tensors unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of a mesh of one dimension, by their numbers in the default group."""
    return tuple(dist.get_process_group_ranks(mesh.get_group()))


def one_mesh(what: str, meshes: Iterable[DeviceMesh | None]) -> DeviceMesh | None:
    """The mesh that all split modules share; None if no module is split.

    Raises UnsupportedError if there are several meshes. `what`: the kind of parallelism.
    """
    found = {ranks_of(mesh): mesh for mesh in meshes if mesh is not None}
    if len(found) > 1:
        raise UnsupportedError(
            f"modules of the model are split over different {what}-parallel groups of ranks "
            f"({', '.join(map(str, sorted(found)))}), which has not been shown exact. Split all of "
            "them over one mesh dimension."
        )
    return next(iter(found.values()), None)


class Holder:
    """One library's parallelism of a model on several ranks, or several of these together.

    By default, each method calls every part and combines the results: sums of bytes, products of
    factors, unions. A library's holder has no parts and overrides methods.

    A step reduces gradients once, when it tells the holders to.
    """

    parts: Sequence["Holder"] = ()
    lockstep: bool = False
    gathers: bool = False
    reduces: bool = False
    listens: bool = False
    length_multiple: int = 1
    """The attributes above are explained in `Topology`."""
    param_dtypes: frozenset[torch.dtype] = frozenset()
    """Dtypes to which parameters are cast for forwards; empty if they are not cast."""
    relations: Mapping[Relation, tuple[int, ...]]
    """The ranks that hold the model, by kind of parallelism."""
    meshes: Sequence[DeviceMesh] = ()
    """The known device meshes of the model."""
    process_groups: Sequence[tuple[int, ...]] = ()
    """Ranks of further groups that the holder needs; its meshes have theirs (`process_group`)."""
    splits: Sequence[tuple[str, nn.Module, Any]] = ()
    """Modules that each rank computes a part of: name, module, and how it is split."""
    experts: Collection[nn.Module] = ()
    """Modules whose experts are split over ranks."""
    ranks: DataRanks
    """All ranks that step together."""

    @property
    def gathered(self) -> bool:
        """Whether weights stay gathered until the step ends. Its forwards and backwards then issue
        no collective, and gradients stay on this rank until `reduce_held`."""
        return any(part.gathered for part in self.parts)

    def check(self, model: nn.Module, *, training: bool) -> None:
        """Raises UnsupportedError for settings that have not been shown exact."""
        for part in self.parts:
            part.check(model, training=training)

    def deferred_params(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Parameters whose gradients `reduce` completes after all backwards."""
        found = {p for part in self.parts for p in part.deferred_params(parameters)}
        return [parameter for parameter in parameters if parameter in found]

    def factor(self, *, mean: bool) -> float:
        """Factor of this rank's loss with which reduced gradients are those of the sum of all
        ranks' losses. With `mean`, the factor with which they are reduced as in ordinary
        training."""
        return math.prod((part.factor(mean=mean) for part in self.parts), start=1.0)

    def use(self, gather: Gather, changes: Changes) -> None:
        """Gather weights once a step, or for each microbatch, from the next `enter` until the
        changes are undone."""
        for part in self.parts:
            part.use(gather, changes)

    def held_bytes(self, gather: Gather) -> int:
        """Peak bytes of gathered weights on this rank in a step, in addition to its shard."""
        return sum(part.held_bytes(gather) for part in self.parts)

    def missing_bytes(self) -> int:
        """Bytes of gradients that a step will allocate, without those in `.grad`."""
        return sum(part.missing_bytes() for part in self.parts)

    def whole_parameters(self) -> Iterable[nn.Parameter]:
        """Gathered parameters, which forwards use instead of the optimizer's shards."""
        return chain.from_iterable(part.whole_parameters() for part in self.parts)

    def enter(
        self, changes: Changes, blocks: Sequence[nn.Module], whole: Iterable[nn.Parameter]
    ) -> None:
        """Begin a step: no backward reduces gradients until `last`, or until the changes are
        undone.

        Collective if weights are gathered for the step. Unreduced gradients of earlier stock
        backwards are set aside until the changes are undone.

        whole: `whole_parameters` of all holders.
        """
        for part in self.parts:
            part.enter(changes, blocks, [*whole, *self.whole_parameters()])

    def end_forward(self) -> None:
        """End a forward of the step. It may run within a backward of the user (`logprobs`)."""
        for part in self.parts:
            part.end_forward()

    def last(self) -> None:
        """Announce the last backward of the step, which is the next one."""
        for part in self.parts:
            part.last()

    def reduce_held(self) -> None:
        """Reduce the gradients of a step with gathered weights. Collective."""
        for part in self.parts:
            part.reduce_held()

    def reduce_earlier(self) -> None:
        """Reduce unreduced gradients of stock backwards before the step, if the library's settings
        allow it. Called after a successful step. Collective if there are any."""
        for part in self.parts:
            part.reduce_earlier()

    def reduce(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter], *, mean: bool
    ) -> list[Tensor | None]:
        """Complete gradients of `deferred_params`, as sums over ranks, or means with `mean`.
        Returns one for each parameter, None if no rank has one. Collective."""
        found = list(gradients)
        for part in self.parts:
            found = part.reduce(found, parameters, mean=mean)
        return found

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor in place by its sum over ranks with different batches. Collective."""
        for part in self.parts:
            part.all_reduce(tensor)

    def reshard(self) -> None:
        """Free gathered weights: every parameter is the optimizer's shard again."""
        for part in self.parts:
            part.reshard()

    def reset(self, *, lost: bool) -> None:
        """Drop the gradients of a failed step; with `lost`, also unreduced ones from before it."""
        for part in self.parts:
            part.reset(lost=lost)


class SplitHolder(Holder):
    """A library's tensor and expert parallelism."""

    lockstep = True

    def __init__(self, splits: Sequence[tuple[str, nn.Module, Any]]) -> None:
        """`splits`: name, module, and its split, with attributes `tensor` and `expert`: the mesh,
        or None."""
        self.splits: Sequence[tuple[str, nn.Module, Any]] = tuple(splits)
        self.experts: Collection[nn.Module] = {m for _, m, how in splits if how.expert is not None}
        self.tensor: DeviceMesh | None = one_mesh("tensor", [how.tensor for _, _, how in splits])
        self.expert: DeviceMesh | None = one_mesh("expert", [how.expert for _, _, how in splits])
        relations: dict[Relation, tuple[int, ...]] = {}
        if self.tensor is not None:
            relations["tensor"] = ranks_of(self.tensor)
        if self.expert is not None:
            relations["expert"] = ranks_of(self.expert)
        self.relations: Mapping[Relation, tuple[int, ...]] = relations


class Distributed(Holder):
    """All holders of one model, and the topology that was read from them.

    Without holders, the model is on this process only.
    """

    def __init__(
        self,
        holders: Sequence[Holder] = (),
        topology: Topology | None = None,
        ranks: DataRanks | None = None,
    ) -> None:
        topology, ranks = topology or Topology(), ranks or DataRanks()
        self.parts: Sequence[Holder] = tuple(holders)
        self.topology: Topology = topology
        self.ranks = ranks
        self.splits: Sequence[tuple[str, nn.Module, Any]] = [x for h in holders for x in h.splits]
        self.param_dtypes: frozenset[torch.dtype] = frozenset().union(
            *(holder.param_dtypes for holder in holders)
        )
        for holder in holders:
            holder.ranks = ranks
