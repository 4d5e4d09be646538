"""Gradients of before a step, and how those that a failed step has added are taken back."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from forkpoint.engine.distributed import LocalModel, ModelHolder
from forkpoint.engine.gradient_sums import GradientSums
from forkpoint.engine.leaf_sums import LeafSums


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank: all of it unless it is a DTensor."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        return to_local()


class GradientGuard:
    """Knows what `.grad` was before a step, and takes back what a failed one has added."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        *,
        restore: bool,
        sums: GradientSums | None = None,
        holder: ModelHolder | None = None,
    ) -> None:
        """
        Args:
            parameters: those that train.
            restore: whether copies of earlier gradients are kept, to put back after a failure.
            sums: of parameters whose gradients stay as they are until all backwards are done.
            holder: of the model; by default this process alone.
        """
        self.parameters = parameters
        self.sums: GradientSums | None = sums
        self.before: list[Tensor | None] = [p.grad for p in parameters]
        self.copies: list[Tensor | None] | None = None
        if restore:
            self.copies = [None if g is None else g.detach().clone() for g in self.before]
        self.others: LeafSums = LeafSums()
        """Gradients of leaves that the loss reads and that no wrapper reduces."""
        self.touched: bool = False
        """Whether gradients may have been added to."""
        self.holder: ModelHolder = holder or LocalModel()

    def begin(self) -> None:
        """A backward is about to begin."""
        # Parameters all of which are summed up apart have not been touched.
        here = self.sums is None or len(self.sums.parameters) < len(self.parameters)
        self.touched = self.touched or (here and not self.holder.gathered)

    def begin_loss(self, leaves: Iterable[Tensor]) -> None:
        """A backward of the loss is about to add to gradients of these leaves."""
        summed = set() if self.sums is None else set(self.sums.parameters)
        here = set(self.parameters) - summed
        self.touched = self.touched or any(leaf in here for leaf in leaves)

    def add_sums(self) -> None:
        """All backwards are done: what was summed up apart from `.grad` joins it."""
        self.others.add_to_gradients()
        if self.sums is not None:
            self.touched = True
            self.sums.add_to_gradients()

    def missing_bytes(self) -> int:
        """Bytes of the gradients, or of their sums, that do not exist yet."""
        apart = 0 if self.sums is None else self.sums.missing_bytes()
        if self.holder.reduces:
            return apart + self.holder.missing_bytes()
        summed = set() if self.sums is None else set(self.sums.parameters)
        missing = (local(p) for p in self.parameters if p.grad is None and p not in summed)
        return apart + sum(p.numel() * p.element_size() for p in missing)

    def take_back(self) -> Literal["unchanged", "cleared"]:
        """Remove what the step has added; after an interrupt it can be repeated.

        Where gradients were there before and no copy of them was kept, all are set to None.
        """
        lost = self.touched and self.copies is None and any(g is not None for g in self.before)
        self.holder.reset(lost=lost)
        self.others.restore(lost=lost)
        if not self.touched:
            return "unchanged"
        if self.sums is not None:
            self.sums.drop()
        copies = self.copies or [None] * len(self.before)
        for parameter, before, copy in zip(self.parameters, self.before, copies, strict=True):
            if before is None or copy is None:
                parameter.grad = None
                continue
            # Into the tensor that was there: optimizers and buckets may hold on to it.
            before.detach().copy_(copy)
            parameter.grad = before
        return "cleared" if lost else "unchanged"
