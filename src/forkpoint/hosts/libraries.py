"""Libraries whose models can be entered, and the choice of one for a model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forkpoint.hosts.entry import Library
from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.torch_dist.copies import copy_in
from forkpoint.hosts.transformers.entry import TransformersEntry
from forkpoint.hosts.transformers.stock import TransformersStock
from forkpoint.hosts.transformers.tensor_parallel import split_holder, unsplit

Stock = TransformersStock
"""The stock forward of a model, or of a copy of one."""
TRANSFORMERS = Library(TransformersEntry, split_holder)


def host_of(
    model: nn.Module, *, compile_blocks: bool | None = None, mesh: DeviceMesh | None = None
) -> ModelHost:
    """The host of a model; arguments and errors as of `ModelHost`."""
    return ModelHost(model, TRANSFORMERS, compile_blocks=compile_blocks, mesh=mesh)


def whole_copy(
    model: nn.Module,
    blocks: nn.ModuleList,
    dtype: torch.dtype,
    *,
    streamed: bool,
    splits: Sequence[Any] = (),
) -> tuple[nn.Module, nn.ModuleList]:
    """Copy a model in another dtype, with all that ranks hold in parts, and name its blocks.

    Args:
        model: the model without DistributedDataParallel.
        blocks: of its decoder.
        dtype: of the copy.
        streamed: whether the parameters of its blocks are in the host's memory.
        splits: modules that the library has split over ranks.

    Collective where ranks hold parts.
    """
    copy, copied = copy_in(model, blocks, dtype, streamed=streamed)
    unsplit(copy, splits)
    return copy, copied
