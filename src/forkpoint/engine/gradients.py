"""Gradients of a step: sums over its backwards, and restoring earlier gradients after a failure."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.engine.distributed import Holder
from forkpoint.engine.host import Host


def twins(
    model: nn.Module, parameters: Sequence[nn.Parameter], changes: Changes
) -> list[nn.Parameter]:
    """New parameters with the same storage, which forwards use until the changes are undone.

    DistributedDataParallel has hooks on the model's own parameters, and does not see the backwards
    that reach these.
    """
    made = {parameter: nn.Parameter(parameter.detach()) for parameter in parameters}
    for module in model.modules():
        held: dict[str, Any] = module._parameters
        for name, parameter in held.items():
            if parameter in made:
                changes.set(held, name, made[parameter])
    return [made[parameter] for parameter in parameters]


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype of a parameter's `.grad`, which is its own unless the user has set another."""
    return parameter.grad_dtype or parameter.dtype


class GradientSums:
    """Sums of gradients over the backwards of a step; in float32 or wider with `fp32`.

    Autograd adds to `.grad` in the parameter's dtype; in bfloat16 each addition rounds the sum to 8
    bits. If gradients are reduced over ranks, gradients from before the step must not be included.
    So `.grad` is None while this collects.
    """

    def __init__(self, parameters: list[nn.Parameter], *, fp32: bool) -> None:
        self.parameters = parameters
        self.fp32: bool = fp32
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._of_leaf: dict[Tensor, nn.Parameter] = {}
        self._dropped = False

    def collect(self, changes: Changes, leaves: Sequence[nn.Parameter]) -> None:
        """Collect gradients of backwards, until the changes are undone.

        `.grad` is then as before, and the sums remain in this object. `leaves`: for each parameter,
        the one that forwards use: itself, or its twin.
        """
        for parameter, leaf in zip(self.parameters, leaves, strict=True):
            self._of_leaf[leaf] = parameter
            changes.later(self._leave, leaf, leaf.grad)
            leaf.grad = None
            leaf.register_post_accumulate_grad_hook(self._take)

    def _leave(self, leaf: nn.Parameter, before: Tensor | None) -> None:
        # Not by the handle that the registration returns: an interrupt may have lost that.
        hooks = leaf._post_accumulate_grad_hooks or {}
        for key in [key for key, hook in hooks.items() if hook == self._take]:
            del hooks[key]
        if not self._dropped:
            leaf.grad = before

    def drop(self) -> None:
        """Drop the sums of a failed step, and do not restore earlier gradients."""
        self._dropped = True
        self._sums = {}

    def _take(self, leaf: nn.Parameter) -> None:
        gradient = leaf.grad
        assert gradient is not None
        leaf.grad = None
        parameter = self._of_leaf[leaf]
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._sums[parameter] = gradient.detach().to(wide if self.fp32 else gradient.dtype)

    def reduce(self, over_ranks: Callable[[Sequence[Tensor | None]], list[Tensor | None]]) -> None:
        """Replace the sums by `over_ranks(sums)`, with one entry for each parameter."""
        reduced = over_ranks([self._sums.get(parameter) for parameter in self.parameters])
        pairs = zip(self.parameters, reduced, strict=True)
        self._sums = {p: total for p, total in pairs if total is not None}

    def add_to_gradients(self) -> None:
        """Add each sum to its parameter's gradient, and drop it."""
        while self._sums:
            parameter, total = self._sums.popitem()
            if parameter.grad is None:
                parameter.grad = total.to(gradient_dtype(parameter))
            else:
                # In place: optimizers and buckets may hold on to this tensor.
                parameter.grad.detach().add_(total)


class GradientGuard:
    """Remembers `.grad` from before a step, and removes what a failed step has added."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        *,
        restore: bool,
        sums: GradientSums | None,
        holder: Holder,
    ) -> None:
        """`restore`: whether to copy earlier gradients, so that a failure can restore them. `sums`:
        of parameters whose `.grad` does not change until all backwards are done."""
        self.parameters = parameters
        self.sums: GradientSums | None = sums
        self.before: list[Tensor | None] = [p.grad for p in parameters]
        self.copies: list[Tensor | None] | None = None
        if restore:
            self.copies = [None if g is None else g.detach().clone() for g in self.before]
        self.touched: bool = False
        """Whether the step may have changed some `.grad`."""
        self.began: bool = False
        """Whether any backward has begun."""
        self.holder = holder

    def begin(self) -> None:
        """Note that a backward is about to begin."""
        self.began = True
        # It changes no `.grad` of a parameter whose gradients are summed.
        here = self.sums is None or len(self.sums.parameters) < len(self.parameters)
        self.touched = self.touched or (here and not self.holder.gathered)

    def add_zeros(self, host: Host) -> None:
        """Set `.grad` to zeros where it is None and the model's forward reads the parameter.

        For a step that trains on no token. An ordinary loop multiplies each token's loss by the
        loss mask, which results in zero gradients. An optimizer applies momentum and weight decay
        to parameters with zero gradients, and skips parameters without gradients. `host` must not
        be entered.
        """
        reached: Sequence[object | None] = self.parameters
        if not host.topology.lockstep:
            with torch.enable_grad():
                empty = host.empty_outputs()
            if not empty.requires_grad:
                return
            zeros = torch.zeros_like(empty)
            reached = torch.autograd.grad(empty, self.parameters, zeros, allow_unused=True)
        # All shards get zeros: the step's collectives cover no further forward.
        for parameter, found in zip(self.parameters, reached, strict=True):
            if found is not None and parameter.grad is None:
                self.touched = True
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))

    def take_back(self) -> Literal["unchanged", "cleared"]:
        """Remove what the step has added; after an interrupt it can be repeated.

        If there were earlier gradients and they were not copied, every `.grad` becomes None.
        """
        lost = self.touched and self.copies is None and any(g is not None for g in self.before)
        self.holder.reset(lost=lost)
        if not self.touched:
            return "unchanged"
        if self.sums is not None:
            self.sums.drop()
        copies = self.copies or [None] * len(self.before)
        for parameter, before, copy in zip(self.parameters, self.before, copies, strict=True):
            if before is None or copy is None:
                parameter.grad = None
                continue
            before.detach().copy_(copy)
            parameter.grad = before
        return "cleared" if lost else "unchanged"
