"""Libraries whose models can be entered, and the choice of one for a model."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forkpoint.hosts.entry import Library
from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.transformers.entry import TransformersEntry
from forkpoint.hosts.transformers.split_copies import TensorParts
from forkpoint.hosts.transformers.stock import TransformersStock
from forkpoint.hosts.transformers.tensor_parallel import split_holder

Stock = TransformersStock
TRANSFORMERS = Library(TransformersEntry, split_holder)


def host_of(
    model: nn.Module, *, compile_blocks: bool | None = None, mesh: DeviceMesh | None = None
) -> ModelHost:
    """The host of a model; arguments and errors as of `ModelHost`."""
    return ModelHost(model, TRANSFORMERS, compile_blocks=compile_blocks, mesh=mesh)


def stock_of(model: nn.Module) -> Stock:
    """The stock forward of a model, or of a copy of one."""
    return TransformersStock(model)


def split_parts(model: nn.Module, splits: Sequence[Any]) -> TensorParts:
    """The parts that ranks have of copies of a model whose modules are split over them."""
    return TensorParts(model, splits)
