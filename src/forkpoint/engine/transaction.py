"""Transactions of a policy's calls: a call that an exception ends has all of its effects or none.

The point of success is one assignment: `StepOutcome.gradients` becomes "added". An exception that
leaves `Transaction.run` before it finds gradients, model and thread as they were. One that leaves
it later finds the whole gradient, and has a note that says so.
"""

import contextlib
import operator
import sys
import traceback
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch._C import _autograd
from torch.utils import checkpoint

from forkpoint.engine.changes import Changes
from forkpoint.engine.gradients import GradientGuard

T = TypeVar("T")

UNCHANGED = (
    "forkpoint: this step failed; .grad is as it was before it, and the step may be tried again."
)
CLEARED = (
    "forkpoint: this step failed after some of its gradients had been added, so they were removed: "
    "every .grad is None, and an accumulated step must be redone from its start. "
    "Config(restore_grads=True) keeps a copy of earlier gradients and puts it back instead."
)
ADDED = (
    "forkpoint: this exception arrived after the step had succeeded; its gradients are in .grad, "
    "and the step must not be repeated."
)
NOTES = {"unchanged": UNCHANGED, "cleared": CLEARED, "added": ADDED}
ATTEMPTS = 100
"""Attempts to undo changes. Interrupts end one or two attempts; a defect of forkpoint or a failed
device ends all of them."""

# Functions of these files hold generators, which an exception may leave suspended.
_HOLDERS = frozenset({contextlib.__file__, checkpoint.__file__})
_BOTH = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)


class ThreadState:
    """Grad mode, autocast, hooks on saved tensors and the CUDA stream of this thread.

    torch's context managers change them in Python: an exception that arrives while one is entered
    or left may leave the change in place.
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: the device of the step; the CPU is always included."""
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", device.type}
            if torch.amp.is_autocast_available(kind)
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._nesting = _autocast_nesting()
        self._hooks = _top_hooks()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Return to the state in which this was made; after an interrupt it can be repeated."""
        while (top := _top_hooks()) is not None and top != self._hooks:
            _autograd._pop_saved_tensors_default_hooks()
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cache)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        if not self._nesting:
            torch.clear_autocast_cache()
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        torch.set_grad_enabled(self._grad)


def _autocast_nesting() -> int:
    # torch has no function that only reads the nesting. One call in C changes it there and back, so
    # no interrupt arrives in between.
    return tuple(map(operator.call, _BOTH))[1]


def _top_hooks() -> object:
    """The innermost pair of hooks on saved tensors, or None."""
    return _autograd._top_saved_tensors_default_hooks(True)


def close_generators(error: BaseException, before: BaseException | None) -> None:
    """End the generators of context managers and checkpoints that an exception left suspended.

    Otherwise their changes (torch's checkpoint sets hooks on saved tensors) stay in force until
    the traceback is gone, and ending then changes the state of other code.

    before: the exception that was being handled when the step began, if any; its frames are not
        the step's.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and found is not before and id(found) not in seen:
        seen.add(id(found))
        for frame, _ in reversed(list(traceback.walk_tb(found.__traceback__))):
            if frame.f_code.co_filename in _HOLDERS:
                # A frame that is running cannot be cleared.
                with contextlib.suppress(RuntimeError):
                    frame.clear()
        found = found.__context__


class StepOutcome:
    """Effect of a call of `Policy.forward_backward` on `.grad`. See `Policy.last_step`."""

    def __init__(self) -> None:
        self.gradients: Literal["pending", "unchanged", "cleared", "added"] = "pending"
        """pending: the step is running, or its changes could not be undone.
        unchanged: the step failed, and every `.grad` is as before it. You can repeat the step.
        cleared: the step failed, and every `.grad` is None. Gradients accumulated earlier are lost
            and must be computed again.
        added: the step succeeded, and its whole gradient is in `.grad`. Do not repeat it.
        """

    def __repr__(self) -> str:
        return f"StepOutcome(gradients={self.gradients!r})"


class Transaction:
    """Records the changes of one call to model, gradients and thread, and undoes them if it fails.

    A transaction begins at its construction. If the work of `run` returns, `run` commits: it undoes
    the temporary changes and keeps the gradients. If the work raises, `run` rolls everything back.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` is that of the model."""
        self.changes: Changes = Changes()
        """Temporary changes, which are undone at the end of the call in any case."""
        self.guard: GradientGuard | None = None
        """Guard of the gradients; set before the first backward of a call that adds to them."""
        self.outcome: StepOutcome = StepOutcome()
        self.notes: bool = False
        """Whether exceptions get a note on what became of the gradients."""
        self._thread = ThreadState(device)
        self._handled = sys.exception()
        self._is_rolled_back = False

    def is_committed(self) -> bool:
        """Whether the call has succeeded; then nothing takes its gradients back."""
        return self.outcome.gradients == "added"

    def run(self, work: Callable[["Transaction"], T]) -> T:
        """Call `work` with this transaction, and return its result. `work` must make its changes
        with it.

        If it raises, everything is rolled back before the error leaves. An interrupt may end the
        rollback at any bytecode, so three nested levels each do it.
        """
        try:
            try:
                try:
                    result = work(self)
                    self._commit()
                    return result
                except BaseException as error:
                    self._roll_back(error)
                    raise
            except BaseException as error:
                self._roll_back(error)
                raise
        except BaseException as error:
            self._roll_back(error)
            raise

    def _commit(self) -> None:
        self.changes.undo()
        self.outcome.gradients = "added"  # the one point of success

    def _roll_back(self, error: BaseException) -> None:
        """Undo everything unless the call has succeeded, and add a note to `error` that says which.

        Exceptions that arrive during this do not end it. If one is not an `Exception`, such as
        KeyboardInterrupt, it is raised at the end instead of `error`, which becomes its context.
        """
        interrupts: list[BaseException] = []
        try:
            for _ in range(ATTEMPTS):
                try:
                    if not self._is_rolled_back:
                        self._undo_everything(error, interrupts)
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

    def _undo_everything(self, error: BaseException, interrupts: list[BaseException]) -> None:
        """Undo each change separately. If one cannot be undone, add a note to `error`."""

        def done(action: Callable[[], object]) -> bool:
            """Repeat an action until it completes. Returns whether it did."""
            for _ in range(ATTEMPTS):
                try:
                    action()
                    return True
                except BaseException as other:
                    interrupts.append(other)
            error.add_note(f"forkpoint: this step could not be undone: {interrupts[-1]!r}")
            return False

        done(lambda: close_generators(error, self._handled))
        done(self._thread.restore)
        done(self._take_back)
        while not done(self.changes.undo):
            self.changes.forget()
        if isinstance(error, torch.OutOfMemoryError):
            # While the error is handled, its traceback keeps the step's frames alive, and so memory
            # that a smaller step needs, which the caller may try within the except clause.
            done(lambda: traceback.clear_frames(error.__traceback__))
        self._is_rolled_back = True

    def _take_back(self) -> None:
        if self.outcome.gradients == "pending":
            self.outcome.gradients = self.guard.take_back() if self.guard else "unchanged"
        self.guard = None

    def _note(self, error: BaseException) -> None:
        note = NOTES.get(self.outcome.gradients)
        if self.notes and note is not None and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
