"""Supported libraries of models, and the choice of the library of a model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from forkpoint.engine.feature import Links
from forkpoint.engine.host import FoundRouter
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.hosts.entry import Library, Stock
from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.modules import forget_lists
from forkpoint.hosts.titan.entry import TitanEntry
from forkpoint.hosts.titan.families import is_titan
from forkpoint.hosts.titan.splits import split_holder as titan_split_holder
from forkpoint.hosts.titan.splits import unsplit as titan_unsplit
from forkpoint.hosts.titan.stock import TitanStock
from forkpoint.hosts.topology import holders_of, unwrapped
from forkpoint.hosts.torch_dist.copies import copy_in
from forkpoint.hosts.torch_dist.stages import DIMENSION, has_stages
from forkpoint.hosts.transformers.entry import TransformersEntry
from forkpoint.hosts.transformers.stock import TransformersStock
from forkpoint.hosts.transformers.tensor_parallel import split_holder, unsplit
from forkpoint.hosts.wrappers import uncompiled
from forkpoint.plan.stages import stages_of_shape

TRANSFORMERS = Library(TransformersEntry, TransformersStock, split_holder, unsplit)
TITAN = Library(TitanEntry, TitanStock, titan_split_holder, titan_unsplit)


def library_of(model: nn.Module) -> Library:
    """The library of a model, which may be inside wrappers; transformers by default."""
    return TITAN if is_titan(unwrapped(uncompiled(model))) else TRANSFORMERS


def host_of(
    model: nn.Module, *, compile_blocks: bool | None = None, mesh: DeviceMesh | None = None
) -> ModelHost:
    """Make the host of a model. If the mesh has stages and no data-parallel wrapper holds the
    model, the model is cut first. Arguments and errors: as of `ModelHost`."""
    library = library_of(model)
    if has_stages(mesh) and not _data_holders(model, library):
        cut_model(model, mesh)
    return ModelHost(model, library, compile_blocks=compile_blocks, mesh=mesh)


def _data_holders(model: nn.Module, library: Library) -> bool:
    holders = holders_of(uncompiled(model), library.split_holder)
    return any("data" in holder.relations for holder in holders)


def cut_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Drop the modules of other stages of a pipeline. Arguments and errors: as of
    `forkpoint.cut`."""
    if not isinstance(mesh, DeviceMesh) or DIMENSION not in (mesh.mesh_dim_names or ()):
        names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ConfigError(
            f"mesh has no dimension {DIMENSION!r}, whose ranks would be stages of a pipeline "
            f"(found: {names}). Give a DeviceMesh made with mesh_dim_names=('dp', 'pp'), say."
        )
    model = uncompiled(model)
    library = library_of(model)
    if _data_holders(model, library):
        raise UnsupportedError(
            "fully_shard or DistributedDataParallel holds the model already. Cut the whole model "
            "first, and shard or replicate what is left."
        )
    entry = library.entry(model, ())
    stages = stages_of_shape(entry.shape(), mesh[DIMENSION].size(), entry.stage.first_layers)
    entry.stage.hold(stages[mesh.get_local_rank(DIMENSION)])
    forget_lists()
    # Zeros instead of embeddings have no memory to which DistributedDataParallel could copy.
    dropped = [n for n, b in model.named_buffers() if b.untyped_storage().nbytes() < b.nbytes]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, dropped)


def stock_of(model: nn.Module) -> Stock:
    """The stock forward of a model or a copy."""
    return library_of(model).stock(model)


def whole_copy(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    dtype: torch.dtype,
    *,
    streamed: bool,
    splits: Sequence[Any] = (),
    links: Links | None = None,
) -> tuple[nn.Module, list[nn.Module]]:
    """Make a whole copy of a model in another dtype. Returns the copy and its blocks.

    Args:
        streamed: whether the parameters of its blocks are in host memory.

    Collective if ranks hold parts of the model.
    """
    copy, copied = copy_in(model, blocks, dtype, streamed=streamed)
    library = library_of(model)
    library.unsplit(copy, splits)
    if links is not None and links.stages:
        library.entry(copy, ()).stage.complete(links.exchange)
        copied = library.entry(copy, ()).blocks
    return copy, copied


def routers_of(model: nn.Module) -> Sequence[FoundRouter]:
    """The routers of a model or a copy."""
    return library_of(model).entry(model, ()).routers.found
