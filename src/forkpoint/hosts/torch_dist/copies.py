"""Whole copies of a model in another dtype, also of a sharded model."""

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from forkpoint.hosts.modules import HOOKS, plain_class

OF_SHARDING = "torch.distributed"
"""Module of the hooks that fully_shard adds."""
COMPOSABLE = "__composable_api"
"""Prefix of attributes in which torch records its changes of a module."""


def copy_in(
    model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype, *, streamed: bool
) -> tuple[nn.Module, list[nn.Module]]:
    """Copy a model in another dtype. Returns the copy and its blocks. Collective if the model is
    sharded.

    With `streamed`, the parameters of the blocks are in host memory.
    """
    inside = {id(p) for block in blocks for p in block.parameters()} if streamed else set()
    copies: dict[int, Any] = {
        id(value): value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, DeviceMesh | dist.ProcessGroup)
    }
    for tensor in chain(model.parameters(), model.buffers()):
        if id(tensor) in copies:
            continue
        place = torch.device("cpu") if id(tensor) in inside else tensor.device
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        copied = full(tensor.detach()).to(place, kind, copy=True)
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
        copies[id(tensor)] = copied
    _copy_sharded(model, copies)
    twin = copy.deepcopy(model, copies)
    for module in twin.modules():
        # The copy computes in one dtype. Functions are not copied, because they call the original
        # model.
        vars(module).pop("forward", None)
        # Attributes of fully_shard for its parameters. They cannot be pickled.
        module._load_state_dict_post_hooks.clear()
    names = {module: name for name, module in model.named_modules()}
    return twin, [twin.get_submodule(names[block]) for block in blocks]


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a DTensor; other tensors unchanged. Collective for DTensors."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _copy_sharded(model: nn.Module, copies: dict[int, Any]) -> None:
    """Copy the modules that fully_shard has changed, with their earlier classes.

    torch cannot copy them. Children are copied before their parents, and are found in `copies`.
    """
    for module in reversed(list(model.modules())):
        if not isinstance(module, FSDPModule):
            continue
        kind = plain_class(cast(nn.Module, module))
        twin = nn.Module.__new__(kind)
        copies[id(module)] = twin
        own = {
            name: _own_hooks(value) if name in HOOKS else value
            for name, value in vars(module).items()
            if not str(name).startswith(COMPOSABLE)
        }
        vars(twin).update(copy.deepcopy(own, copies))


def _own_hooks(hooks: dict[int, Any]) -> dict[int, Any]:
    return type(hooks)(
        (number, hook)
        for number, hook in hooks.items()
        if not getattr(hook, "__module__", "").startswith(OF_SHARDING)
    )
