"""Load-balancing losses of a mixture's routers, as TRL's trainers add them.

TRL takes one statistic over the rows of each micro-batch, all of their tokens, and adds each to
its loss with a factor. The losses of a window are a sum of such terms, so that forkpoint computes
their mean over the micro-batches, and gives it to TRL's code as the loss of every one of them: the
window's loss, its gradient and the mean that is logged are the same.

Gradients of several ranks' losses are averaged over the ranks, each of which has as many
micro-batches, so that there the mean is over the micro-batches of all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.integrations.trl.rows import PackedRows
from forkpoint.losses.router import RouterLoss
from forkpoint.policy import Policy


def check_routers(trainer: Any, policy: Policy) -> None:
    """Raises UnsupportedError where the trainer adds a router loss that cannot be computed."""
    routers = policy.host.routers
    if getattr(trainer, "aux_loss_enabled", False) and not (
        routers.layers and routers.defines_loss
    ):
        raise UnsupportedError(
            f"{type(trainer.args).__name__} has "
            f"router_aux_loss_coef={trainer.args.router_aux_loss_coef!r}, so that TRL adds a "
            "load-balancing loss, and transformers records no router logits of this model, or "
            "defines no such loss for it. Set router_aux_loss_coef=0.0."
        )


def router_loss(packed: PackedRows, factor: float) -> RouterLoss:
    """The mean, times `factor`, of the calls' load-balancing losses."""
    scope, begin = [], 0
    for rows in packed.calls:
        end = begin + len(rows.input_ids)
        scope.append(range(begin, end))
        begin = end
    return RouterLoss(load_balancing=factor, z=0.0, scope=scope)


def factor_of(
    losses: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    packed: PackedRows,
    names: tuple[str, ...],
) -> float:
    """The factor of the mean of a window's load-balancing losses in TRL's loss, which is linear in
    it: a gradient of TRL's own code, at log-probs of 0.

    losses: TRL's loss of what is given for tokens, by name, and of that mean.
    names: of what is given for tokens.
    """
    zeros_T = torch.zeros(len(packed.cells), device=packed.cells.device)
    mean = torch.zeros((), device=packed.cells.device, requires_grad=True)
    with torch.enable_grad():
        value = losses(dict.fromkeys(names, zeros_T), mean)
        (factor,) = torch.autograd.grad(value, mean, allow_unused=True, materialize_grads=True)
    found = float(factor)
    if not found:
        raise UnsupportedError(
            "the trainer asks its model for a load-balancing loss and does not add it to its own; "
            "set router_aux_loss_coef=0.0."
        )
    return found


def one_factor(factors: Sequence[Tensor]) -> float:
    """The factor of every call's load-balancing loss.

    Raises UnsupportedError where they differ: a step takes one mean of all.
    """
    found = [float(factor) for factor in factors]
    if len(set(found)) > 1:
        raise UnsupportedError(
            "the loss gives the load-balancing losses of one optimizer step's micro-batches "
            f"different factors, {', '.join(f'{x:.6g}' for x in sorted(set(found)))}, and a step "
            "takes one. Give all micro-batches the same weight, or set router_aux_loss_coef=0.0."
        )
    return found[0]
