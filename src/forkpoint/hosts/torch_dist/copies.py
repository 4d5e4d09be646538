"""Whole copies of a model in another dtype, also where ranks hold it in parts."""

import copy
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from forkpoint.hosts.modules import HOOKS, plain_class

OF_SHARDING = "torch.distributed"
"""Module of the hooks that fully_shard adds."""
COMPOSABLE = "__composable_api"
"""Beginning of the names under which torch keeps what it has done to a module."""


def copy_in(
    model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype, *, streamed: bool
) -> tuple[nn.Module, list[nn.Module]]:
    """Copy a model in another dtype, and name the copy's blocks. Collective where it is sharded.

    With `streamed` the parameters of the blocks are in the host's memory.
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
        # It computes in one dtype, and functions are not copied: they call the model itself.
        vars(module).pop("forward", None)
        # Of fully_shard, for its own parameters; they cannot be pickled.
        module._load_state_dict_post_hooks.clear()
    names = {module: name for name, module in model.named_modules()}
    return twin, [twin.get_submodule(names[block]) for block in blocks]


def full(tensor: Tensor) -> Tensor:
    """A tensor, whole where each rank has a part of it. Collective then."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def _copy_sharded(model: nn.Module, copies: dict[int, Any]) -> None:
    """Copy the modules that fully_shard has changed, as modules of the classes that they had.

    torch does not copy them. Each comes after its children, which are then in `copies`.
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
