"""Access to private objects of torch's fully_shard, which differ between versions of torch.

torch 2.11 to 2.14 keep unreduced gradients in an attribute of the sharded parameter. From 2.15 on
they are `.grad` of the whole parameter, in a separate dtype, and a reset also drops reduced
gradients.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

SINCE_2_15 = hasattr(FSDPModule, "set_manual_backward_finalization")


def groups_of(module: Any) -> Iterable[Any]:
    """The groups of parameters of one sharded module."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.13 and later
    if several is not None:
        return several
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def holders_in(group: Any) -> list[tuple[nn.Module, str]]:
    """The module and the attribute name of each parameter of a group."""
    infos = (parameter._module_info for parameter in group.fsdp_params)
    return [(info.module, info.param_name) for info in infos]


def trained_of(group: Any) -> list[Any]:
    """The parameters of a group that train."""
    return [p for p in group.fsdp_params if p.sharded_param.requires_grad]


def compute_dtype(parameter: Any) -> torch.dtype:
    """The dtype of the whole parameter in forwards."""
    return parameter.mp_policy.param_dtype or parameter.sharded_param.dtype


def gradient_dtype(parameter: Any) -> torch.dtype:
    """The dtype in which unreduced gradients of the whole parameter are accumulated."""
    reduced = parameter.mp_policy.reduce_dtype
    if reduced is None and SINCE_2_15:
        reduced = parameter.sharded_grad_dtype or parameter.sharded_param.dtype
    return reduced or compute_dtype(parameter)


def takes_any_gradient(parameter: Any) -> bool:
    """Whether gradients are accumulated in the dtype of the backward (`grad_dtype=None`)."""
    by_leaf = SINCE_2_15 and parameter.sharded_grad_dtype is None
    return by_leaf and parameter.mp_policy.reduce_dtype is None


def has_gradient(parameter: Any) -> bool:
    """Whether the whole parameter has an unreduced gradient."""
    whole = getattr(parameter, "_unsharded_param", None)
    if whole is not None and whole.grad is not None:
        return True
    return parameter.unsharded_accumulated_grad is not None


def set_zeros(parameter: Any) -> None:
    """Set the unreduced gradient of the whole parameter to zeros."""
    whole = parameter._unsharded_param
    zeros = torch.zeros_like(whole, dtype=gradient_dtype(parameter))
    if zeros.dtype != whole.dtype and not SINCE_2_15:
        parameter.unsharded_accumulated_grad = zeros
    else:
        whole.grad = zeros


def left_in(group: Any) -> list[tuple[Any, str, Any]]:
    """Gradients of a group that are unreduced, or reduced over one of two mesh dimensions, as
    tuples of object, attribute and value."""
    places = [(group, "_partial_reduce_output")]
    for parameter in group.fsdp_params:
        if not SINCE_2_15:
            places.append((parameter, "unsharded_accumulated_grad"))
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None:
            places.append((whole, "grad"))
    found = ((place, name, getattr(place, name)) for place, name in places)
    return [(place, name, value) for place, name, value in found if value is not None]


def reset(root: Any, modules: list[Any]) -> None:
    """Drop the state of a pass, except reduced gradients."""
    public = getattr(root, "reset_iter_state", None)  # torch 2.13 and later
    if public is None:
        _reset(root._get_fsdp_state(), modules)
        return
    groups = [group for module in modules for group in groups_of(module)]
    sharded = [parameter.sharded_param for group in groups for parameter in group.fsdp_params]
    reduced = [parameter.grad for parameter in sharded]
    public()
    for parameter, grad in zip(sharded, reduced, strict=True):
        if parameter.grad is not grad:  # torch 2.15 and later
            parameter.grad = grad


def is_within_backward(context: Any) -> bool:
    """Whether a backward is running or has failed. fully_shard cannot finish another backward
    then."""
    by_hand = SINCE_2_15 and context.manual_backward_finalization
    return context.post_backward_final_callback_queued and not by_hand


def reduce_gradients(root: Any) -> None:
    """Reduce the gradients of all groups, as at the end of a last backward. Collective."""
    state = root._get_fsdp_state()
    context = state._state_ctx
    # A rank without a backward has not set how backwards are finalized.
    if SINCE_2_15 and context.manual_backward_finalization_active is None:
        context.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def _reset(root: Any, modules: list[Any]) -> None:
    """Do as `reset_iter_state`, for torch before 2.13."""
    context, common = root._state_ctx, root._comm_ctx
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    common.all_gather_state = None
    common.post_forward_order.clear()
    if hasattr(common, "reduce_scatter_state"):
        common.reduce_scatter_state = None
    idle = type(root._training_state).IDLE
    for module in modules:
        module._get_fsdp_state()._training_state = idle
        for group in groups_of(module):
            group._training_state = idle
            group._post_forward_indices.clear()
            group._post_reduce_event = None
