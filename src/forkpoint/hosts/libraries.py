"""Libraries whose models can be entered, and the choice of one for a model."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.transformers.entry import TransformersEntry
from forkpoint.hosts.transformers.stock import TransformersStock


def host_of(
    model: nn.Module, *, compile_blocks: bool | None = None, mesh: DeviceMesh | None = None
) -> ModelHost:
    """The host of a model; arguments and errors as of `ModelHost`."""
    return ModelHost(model, TransformersEntry, compile_blocks=compile_blocks, mesh=mesh)


def stock_of(model: nn.Module) -> TransformersStock:
    """The stock forward of a model, or of a copy of one."""
    return TransformersStock(model)
