"""Objects of torch's fully_shard that have no public names, and that differ by version of torch.

torch 2.11 to 2.14 keep gradients that were not reduced beside a parameter; from 2.15 on they are
`.grad` of the whole parameter, in a dtype of their own, and a reset drops reduced gradients too.
"""

from collections.abc import Iterable
from typing import Any

import torch

from forkpoint.engine.changes import Changes


def groups_of(module: Any) -> Iterable[Any]:
    """The groups of parameters of one sharded module."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.13 and later
    if several is not None:
        return several
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def policies_of(group: Any) -> list[Any]:
    """The MixedPrecisionPolicy of each parameter of a group, each policy once."""
    return list(dict.fromkeys(parameter.mp_policy for parameter in group.fsdp_params))


def present_in(group: Any) -> list[torch.nn.Parameter]:
    """The parameters that modules have now in the places of a group's: its shards, whole ones, or
    others that were loaded since."""
    places = (parameter._module_info for parameter in group.fsdp_params)
    return [getattr(place.module, place.param_name) for place in places]


def trained_of(group: Any) -> list[Any]:
    """The parameters of a group that train."""
    return [p for p in group.fsdp_params if p.sharded_param.requires_grad]


def divisor(group: Any, size: int) -> float:
    """The number that a group's gradients, summed over `size` ranks, are divided by."""
    given = getattr(group, "gradient_divide_factor", None)
    return float(size if given is None else given)


def reduces_by(group: Any) -> str | None:
    """The user's code that gathers or reduces for a group; None where torch's does."""
    if group._all_reduce_hook is not None:
        return "set_all_reduce_hook has given it a function for gradients"
    for name in ("_all_gather_comm", "_reduce_scatter_comm"):
        kind = type(getattr(group, name, None))
        if not kind.__module__.startswith(("torch.", "builtins")):
            return f"collectives of its own are set ({kind.__module__}.{kind.__qualname__})"
    return None


def compute_dtype(parameter: Any) -> torch.dtype:
    """The dtype in which forwards have the whole parameter."""
    return parameter.mp_policy.param_dtype or parameter.sharded_param.dtype


def gradient_dtype(parameter: Any) -> torch.dtype:
    """The dtype in which gradients of the whole parameter are added up before they are reduced."""
    reduced = parameter.mp_policy.reduce_dtype
    if reduced is not None:
        return reduced
    if not hasattr(parameter, "sharded_grad_dtype"):  # before torch 2.15
        return compute_dtype(parameter)
    return parameter.sharded_grad_dtype or parameter.sharded_param.dtype


def takes_any_gradient(parameter: Any) -> bool:
    """Whether gradients are added up in whatever dtype they come (`grad_dtype=None`)."""
    of_leaf = getattr(parameter, "sharded_grad_dtype", parameter.sharded_param.dtype)
    return of_leaf is None and parameter.mp_policy.reduce_dtype is None


def has_gradient(parameter: Any) -> bool:
    """Whether backwards have left a gradient of the whole parameter that was not reduced."""
    whole = getattr(parameter, "_unsharded_param", None)
    if whole is not None and whole.grad is not None:
        return True
    return parameter.unsharded_accumulated_grad is not None


def set_zeros(parameter: Any) -> None:
    """Give the whole parameter a gradient of zeros that was not reduced."""
    whole = parameter._unsharded_param
    zeros = torch.zeros_like(whole, dtype=gradient_dtype(parameter))
    if _keeps_beside(parameter) and zeros.dtype != whole.dtype:
        parameter.unsharded_accumulated_grad = zeros
    else:
        whole.grad = zeros


def left_in(group: Any) -> list[tuple[Any, str, Any]]:
    """Gradients of a group that backwards have left without reducing them, or reduced over one of
    two mesh dimensions: objects, attributes and values."""
    places = [(group, "_partial_reduce_output")]
    for parameter in group.fsdp_params:
        if _keeps_beside(parameter):
            places.append((parameter, "unsharded_accumulated_grad"))
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None:
            places.append((whole, "grad"))
    found = ((place, name, getattr(place, name)) for place, name in places)
    return [(place, name, value) for place, name, value in found if value is not None]


def is_due(group: Any) -> bool:
    """Whether a backward would reduce now what others have left."""
    whole = group.reduce_grads and any(map(has_gradient, group.fsdp_params))
    return whole or (group.all_reduce_grads and group._partial_reduce_output is not None)


def add_zeros_to_partial(group: Any) -> None:
    """Give a group gradients of zeros where it has nothing but what was reduced in part: that is
    reduced along with the next gradients of the same parameters."""
    partial, trained = group._partial_reduce_output, trained_of(group)
    if partial is None or any(map(has_gradient, group.fsdp_params)):
        return
    if sum(p.padded_sharded_param_size.numel() for p in trained) == partial.numel():
        for parameter in trained:
            set_zeros(parameter)


def drop_gradients(group: Any) -> None:
    """Drop gradients of a group that were not reduced, or in part."""
    for place, name, _ in left_in(group):
        setattr(place, name, None)


def reset(root: Any, modules: list[Any]) -> None:
    """Forget what a pass has left, gradients that were reduced excepted."""
    public = getattr(root, "reset_iter_state", None)  # torch 2.13 and later
    if public is None:
        _reset(root._get_fsdp_state(), modules)
        return
    sharded = [
        parameter.sharded_param
        for module in modules
        for group in groups_of(module)
        for parameter in group.fsdp_params
    ]
    reduced = [parameter.grad for parameter in sharded]
    public()
    for parameter, grad in zip(sharded, reduced, strict=True):
        if parameter.grad is not grad:  # torch 2.15 and later
            parameter.grad = grad


def reduce_nothing(root: Any, groups: Iterable[Any], changes: Changes) -> None:
    """Let backwards reduce nothing, over no mesh dimension, until the changes are undone or
    settings made anew."""
    for group in groups:
        changes.set(vars(group), "reduce_grads", False)
        changes.set(vars(group), "all_reduce_grads", False)
    changes.set(vars(root._get_fsdp_state()._state_ctx), "is_last_backward", False)


def shard_after_forward(group: Any) -> None:
    """Shard a group's weights where fully_shard does so after forwards, but for those within a
    backward."""
    if torch._C._current_graph_task_id() != -1 and group.post_forward_mesh_info is not None:
        group.reshard()


def is_within_backward(root: Any) -> bool:
    """Whether a backward is under way, or has failed: then fully_shard ends no other one."""
    context = root._get_fsdp_state()._state_ctx
    by_hand = getattr(context, "manual_backward_finalization", False)  # torch 2.15 and later
    return context.post_backward_final_callback_queued and not by_hand


def reduce_gradients(root: Any) -> None:
    """Reduce the gradients of all groups, as at the end of a last backward. Collective."""
    state = root._get_fsdp_state()
    context = state._state_ctx
    # A rank without a backward has not chosen how backwards end (torch 2.15 and later).
    if getattr(context, "manual_backward_finalization_active", False) is None:
        context.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def end_backwards_themselves(root: Any, changes: Changes) -> None:
    """Let last backwards reduce gradients although the user calls `finalize_backward`, until the
    changes are undone (torch 2.15 and later)."""
    context = root._get_fsdp_state()._state_ctx
    if getattr(context, "manual_backward_finalization", False):
        changes.set(vars(context), "manual_backward_finalization", False)


def _keeps_beside(parameter: Any) -> bool:
    """Whether gradients that were not reduced have an attribute of their own."""
    return not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


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
