"""Gradients of a step's backwards summed apart from `.grad`, and added to it once."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes


def twins(
    model: nn.Module, parameters: Sequence[nn.Parameter], changes: Changes
) -> list[nn.Parameter]:
    """Parameters of the same weights, which forwards use until the changes are undone.

    Nothing that waits for gradients of the model's own sees backwards that reach these.
    """
    made = {parameter: nn.Parameter(parameter.detach()) for parameter in parameters}
    for module in model.modules():
        held: dict[str, Any] = module._parameters
        for name, parameter in held.items():
            if parameter in made:
                changes.set(held, name, made[parameter])
    return [made[parameter] for parameter in parameters]


class GradientSums:
    """Takes what each backward leaves in `.grad` and adds it up, in float32 at least where `wide`.

    Autograd adds into `.grad` in the parameter's dtype: of many microbatches in bfloat16 each sum
    is rounded to 8 bits, and what a microbatch adds may be lost in it. Where ranks add up their
    gradients, those from before the step must not be among them. While this collects, `.grad` is
    empty.
    """

    def __init__(self, parameters: list[nn.Parameter], *, wide: bool = True) -> None:
        self.parameters = parameters
        self.wide: bool = wide
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._of_leaf: dict[Tensor, nn.Parameter] = {}
        self._dropped = False

    def collect(self, changes: Changes, leaves: Sequence[nn.Parameter]) -> None:
        """Collect what backwards leave, until the changes are undone.

        Gradients are then as they were before, and what was summed up is still here. `leaves`: by
        parameter, the one that forwards use: itself, or its twin.
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
        """The step has failed, and its gradients have been taken back: sums and gradients from
        before do not come again."""
        self._dropped = True
        self._sums = {}

    def missing_bytes(self) -> int:
        """Bytes of the sums that do not exist yet."""
        missing = (p for p in self.parameters if p not in self._sums)
        return sum(p.numel() * self._dtype(p).itemsize for p in missing)

    @property
    def leaves(self) -> Collection[Tensor]:
        """Leaves that forwards use: what a backward adds to them is collected."""
        return self._of_leaf.keys()

    def _take(self, leaf: nn.Parameter) -> None:
        gradient = leaf.grad
        assert gradient is not None
        leaf.grad = None
        self.add(self._of_leaf[leaf], gradient)

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient to the sum of a parameter."""
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            self._sums[parameter] = gradient.detach().to(self._dtype(gradient))

    def reduce(self, over_ranks: Callable[[Sequence[Tensor | None]], list[Tensor | None]]) -> None:
        """Replace the sums by those over ranks: a function of one entry for each parameter."""
        reduced = over_ranks([self._sums.get(parameter) for parameter in self.parameters])
        pairs = zip(self.parameters, reduced, strict=True)
        self._sums = {p: total for p, total in pairs if total is not None}

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        return torch.promote_types(tensor.dtype, torch.float32) if self.wide else tensor.dtype

    def add_to_gradients(self) -> None:
        """Add each sum to its parameter's gradient, and let it go."""
        while self._sums:
            parameter, total = self._sums.popitem()
            if parameter.grad is None:
                parameter.grad = total.to(parameter.dtype)
            else:
                # Into the tensor that is there: optimizers and buckets may hold on to it.
                parameter.grad.detach().add_(total)
