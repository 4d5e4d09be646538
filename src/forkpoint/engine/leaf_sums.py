"""Gradients of leaves that are no parameters of the model, kept until a step succeeds."""

from collections.abc import Iterable

from torch import Tensor


class LeafSums:
    """Sums of what a loss's backwards leave in `.grad` of some leaves, added to it at the end.

    Until then `.grad` is as it was before the step.
    """

    def __init__(self) -> None:
        self._before: dict[Tensor, Tensor | None] = {}
        self._copies: dict[Tensor, Tensor] = {}
        """Of `_before`, where sums may have been added to it."""
        self._sums: dict[Tensor, Tensor] = {}

    def begin(self, leaves: Iterable[Tensor]) -> None:
        """A backward is about to add to `.grad` of these leaves, which is empty meanwhile."""
        for leaf in leaves:
            self._before.setdefault(leaf, leaf.grad)
            leaf.grad = None

    def end(self, leaves: Iterable[Tensor], factor: float) -> None:
        """Collect what the backward has left, times a factor."""
        for leaf in leaves:
            gradient = leaf.grad
            leaf.grad = self._before[leaf]
            if gradient is None:
                continue
            if leaf in self._sums:
                self._sums[leaf].add_(gradient.detach(), alpha=factor)
            else:
                # A product: it is no view of a buffer that a wrapper of the leaf writes to again.
                self._sums[leaf] = gradient.detach() * factor

    def add_to_gradients(self) -> None:
        """Add each sum to its leaf's gradient."""
        for leaf, total in self._sums.items():
            if leaf.grad is None:
                leaf.grad = total
            else:
                self._copies[leaf] = leaf.grad.detach().clone()
                # Into the tensor that is there: optimizers and buckets may hold on to it.
                leaf.grad.detach().add_(total)

    def restore(self, *, lost: bool) -> None:
        """Make every `.grad` what it was before the step, or None where the step has `lost` the
        gradients of others. After an interrupt it can be repeated."""
        for leaf, before in self._before.items():
            if before is not None and leaf in self._copies:
                before.detach().copy_(self._copies[leaf])
            leaf.grad = None if lost else before
