"""Nothing is half applied: gradients after a failed step."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from forkpoint.engine.gradient_sums import GradientSums

REDO = (
    "forkpoint: this step failed after some of its gradients had been added, so they were taken "
    "away again: every .grad is None, and an accumulated step must be redone from its start. "
    "Config(restore_grads=True) keeps a copy of earlier gradients and puts it back instead."
)
RESTORED = (
    "forkpoint: this step failed; .grad is as it was before it, and the step may be tried again."
)


class GradientGuard:
    """Takes gradients back if the block fails once a backward has begun."""

    def __init__(
        self, parameters: list[nn.Parameter], *, restore: bool, float32_sums: bool = False
    ) -> None:
        """With `float32_sums` gradients stay as they are until all backwards are done."""
        self.parameters = parameters
        self.sums: GradientSums | None = GradientSums(parameters) if float32_sums else None
        self.before: list[Tensor | None] = [p.grad for p in parameters]
        self.copies: list[Tensor | None] | None = None
        if restore:
            self.copies = [None if g is None else g.detach().clone() for g in self.before]
        self.began: bool = False
        """Whether a backward has begun."""
        self.touched: bool = False
        """Whether gradients may have been added to."""

    def begin(self) -> None:
        """A backward is about to begin."""
        self.began = True
        self.touched = self.sums is None

    def missing_bytes(self) -> int:
        """What gradients, or their sums, will take that do not exist yet."""
        if self.sums is not None:
            return self.sums.missing_bytes()
        return sum(p.numel() * p.element_size() for p in self.parameters if p.grad is None)

    @contextmanager
    def protecting(self) -> Iterator["GradientGuard"]:
        try:
            with self.sums.collecting() if self.sums else nullcontext():
                yield self
            if self.sums is not None:
                self.touched = True
                self.sums.add_to_gradients()
        except BaseException as error:
            if self.touched:
                self._take_back(error)
            elif self.began:
                error.add_note(RESTORED)
            if isinstance(error, torch.OutOfMemoryError):
                # While it is handled, its traceback would keep alive what the step's frames hold:
                # the very memory that a smaller step, tried within the except clause, needs.
                traceback.clear_frames(error.__traceback__)
            raise

    def _take_back(self, error: BaseException) -> None:
        for index, parameter in enumerate(self.parameters):
            before = self.before[index]
            if before is None or self.copies is None:
                parameter.grad = None
                continue
            copy = self.copies[index]
            assert copy is not None
            # Into the tensor that was there: optimizers and buckets may hold on to it.
            before.detach().copy_(copy)
            parameter.grad = before
        accumulated = any(g is not None for g in self.before)
        error.add_note(REDO if accumulated and self.copies is None else RESTORED)
