"""Gradients of a step that trains on no token: zeros, as ordinary training gives.

An ordinary loop multiplies the loss of every token by the loss mask. Where the mask is zero
everywhere, each parameter that the model's forward reads gets a gradient of zeros and not None. An
optimizer tells the two apart: it skips a parameter without a gradient, and otherwise applies
momentum and weight decay. A step without trained tokens does not run rollouts for which nothing
else asks, so it does not reach these parameters by itself; nor does a step whose loss is declared
to be zero everywhere (`Loss.zero_rollouts`).

A step that trains on any token reaches all of them. In supported models no parameter is read for
some tokens alone: experts of a mixture lie in one parameter together.
"""

import torch

from forkpoint.engine.guard import GradientGuard
from forkpoint.engine.host import Host


def add_zero_gradients(host: Host, guard: GradientGuard) -> None:
    """Set `.grad` to zeros where it is None and the model's forward reads the parameter.

    Args:
        host: the model, which must not be entered.
        guard: of the step; it takes the zeros back if the step fails.
    """
    parameters = guard.parameters
    if host.topology.lockstep:
        # Of shards: all, for the step's collectives cover no further forward.
        for parameter in parameters:
            if parameter.grad is None:
                guard.touched = True
                parameter.grad = torch.zeros_like(parameter)
        return
    with torch.enable_grad():
        empty = host.empty_outputs()
    if not empty.requires_grad:
        return
    found = torch.autograd.grad(empty, parameters, torch.zeros_like(empty), allow_unused=True)
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is not None and parameter.grad is None:
            guard.touched = True
            parameter.grad = torch.zeros_like(parameter)
