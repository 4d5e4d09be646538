"""A step happens as a whole or not at all, whatever exception ends it, and at whatever moment.

The moment at which a step happens is one assignment: `StepOutcome.gradients` becomes "added". What
leaves `Step.run` before it finds gradients and model put back; what leaves it after it finds the
whole gradient, and a note that says so.
"""

import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.engine.gradient_sums import GradientSums
from forkpoint.engine.leaf_sums import LeafSums
from forkpoint.engine.thread_state import ThreadState, close_generators

T = TypeVar("T")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank: all of it unless it is a DTensor."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        return to_local()


UNCHANGED = (
    "forkpoint: this step failed; .grad is as it was before it, and the step may be tried again."
)
CLEARED = (
    "forkpoint: this step failed after some of its gradients had been added, so they were taken "
    "away again: every .grad is None, and an accumulated step must be redone from its start. "
    "Config(restore_grads=True) keeps a copy of earlier gradients and puts it back instead."
)
ADDED = (
    "forkpoint: this exception arrived after the step had succeeded; its gradients are in .grad, "
    "and the step must not be repeated."
)
NOTES = {"unchanged": UNCHANGED, "cleared": CLEARED, "added": ADDED}
# How often something is put back that exceptions keep ending. Interrupts end it once or twice; what
# ends it every time is an error of ours, or a device that has failed.
ATTEMPTS = 100


def _nothing(*, lost: bool) -> None:
    pass


class Reset(Protocol):
    """Drops what a failed step has left besides `.grad`; where `lost`, also what was left there
    before it. Can be repeated."""

    def __call__(self, *, lost: bool) -> None: ...


class StepOutcome:
    """Effect of a call of `Policy.forward_backward` to `.grad`. See `Policy.last_step`."""

    def __init__(self) -> None:
        self.gradients: Literal["pending", "unchanged", "cleared", "added"] = "pending"
        """pending: the step is running, or could not be put back.
        unchanged: it failed, and every `.grad` is as it was before it. It may be tried again.
        cleared: it failed, and every `.grad` is None. Gradients that had been accumulated before it
            are lost, so they have to be computed again.
        added: it succeeded, and its whole gradient is in `.grad`. It must not be repeated.
        """

    def __repr__(self) -> str:
        return f"StepOutcome(gradients={self.gradients!r})"


class GradientGuard:
    """Knows what `.grad` was before a step, and takes back what a failed one has added."""

    def __init__(
        self, parameters: list[nn.Parameter], *, restore: bool, sums: GradientSums | None = None
    ) -> None:
        """Gradients of the parameters of `sums` stay as they are until all backwards are done."""
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
        self.reset: Reset = _nothing
        self.held: Callable[[], bool] = bool
        """Whether backwards leave gradients elsewhere than in `.grad`, until they are reduced."""
        self.missing: Callable[[], int] | None = None
        """Bytes of gradients that do not exist yet, where these are not the parameters' own."""

    def begin(self) -> None:
        """A backward is about to begin."""
        # Parameters all of which are summed up apart have not been touched.
        here = self.sums is None or len(self.sums.parameters) < len(self.parameters)
        self.touched = self.touched or (here and not self.held())

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
        if self.missing is not None:
            return apart + self.missing()
        summed = set() if self.sums is None else set(self.sums.parameters)
        missing = (local(p) for p in self.parameters if p.grad is None and p not in summed)
        return apart + sum(p.numel() * p.element_size() for p in missing)

    def take_back(self) -> Literal["unchanged", "cleared"]:
        """Remove what the step has added; after an interrupt it can be repeated.

        Where gradients were there before and no copy of them was kept, all are set to None.
        """
        lost = self.touched and self.copies is None and any(g is not None for g in self.before)
        self.reset(lost=lost)
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


class Step:
    """One call of a policy: what it changes, and how all of it is put back if it fails."""

    def __init__(self, device: torch.device) -> None:
        """`device` is that of the model."""
        self.changes: Changes = Changes()
        """Changes for the time of the step, undone at its end in any case."""
        self.guard: GradientGuard | None = None
        """Set before the first backward of a step that adds to gradients."""
        self.outcome: StepOutcome = StepOutcome()
        self.notes: bool = False
        """Whether an exception gets a note on what became of the gradients."""
        self._thread = ThreadState(device)
        self._handled = sys.exception()
        self._is_back = False

    def run(self, work: Callable[[], T]) -> T:
        """Call `work`, which makes its changes through this step, and return what it returns.

        If it raises, everything is put back first. Putting back may be interrupted itself, at any
        bytecode; so the same is done on three levels, and an interrupt ends one of them.
        """
        try:
            try:
                try:
                    result = work()
                    self.changes.undo()
                    self.outcome.gradients = "added"  # the step happens here
                    return result
                except BaseException as error:
                    self._put_back(error)
                    raise
            except BaseException as error:
                self._put_back(error)
                raise
        except BaseException as error:
            self._put_back(error)
            raise

    def _put_back(self, error: BaseException) -> None:
        """Make sure that everything is put back, or the step happened, and that `error` says which.

        Exceptions that arrive meanwhile do not end this. One that is no `Exception`, such as
        KeyboardInterrupt, is raised at the end, in the place of `error`, which is its context.
        """
        interrupts: list[BaseException] = []
        try:
            for _ in range(ATTEMPTS):
                try:
                    if not self._is_back:
                        self._put_everything_back(error, interrupts)
                    self._note(error)
                    break
                except BaseException as other:
                    interrupts.append(other)
            for interrupt in interrupts[::-1]:
                if not isinstance(interrupt, Exception):
                    self._note(interrupt)
                    raise interrupt
        finally:
            interrupts.clear()  # their tracebacks hold this frame

    def _put_everything_back(self, error: BaseException, interrupts: list[BaseException]) -> None:
        """Put back each thing by itself; what cannot be put back is a note on `error`."""

        def done(action: Callable[[], object]) -> bool:
            """Repeat an action, which can be repeated, until nothing ends it before its end."""
            for _ in range(ATTEMPTS):
                try:
                    action()
                    return True
                except BaseException as other:
                    interrupts.append(other)
            error.add_note(f"forkpoint: the step could not be put back: {interrupts[-1]!r}")
            return False

        done(lambda: close_generators(error, self._handled))
        done(self._thread.restore)
        done(self._take_back)
        while not done(self.changes.undo):
            self.changes.forget()
        if isinstance(error, torch.OutOfMemoryError):
            # While it is handled, its traceback would keep alive what the step's frames hold: the
            # very memory that a smaller step, tried within the except clause, needs.
            done(lambda: traceback.clear_frames(error.__traceback__))
        self._is_back = True

    def _take_back(self) -> None:
        if self.outcome.gradients == "pending":
            self.outcome.gradients = self.guard.take_back() if self.guard else "unchanged"
        self.guard = None

    def _note(self, error: BaseException) -> None:
        note = NOTES.get(self.outcome.gradients)
        if self.notes and note is not None and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
