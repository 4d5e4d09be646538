"""A call of a policy happens as a whole or not at all, whenever an exception ends it.

The moment at which it happens is one assignment: `StepOutcome.gradients` becomes "added". An
exception that leaves `Transaction.run` before it finds gradients, model and thread as they were;
one that leaves it after it finds the whole gradient, and has a note that says so.
"""

import logging
import sys
import traceback
from collections.abc import Callable
from typing import Literal, TypeVar

import torch

from forkpoint.engine.changes import Changes
from forkpoint.engine.compiling import WARNING
from forkpoint.engine.gradients import GradientGuard
from forkpoint.engine.host import Host
from forkpoint.engine.thread_state import ThreadState, close_generators

T = TypeVar("T")
_log = logging.getLogger("forkpoint")

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
# How often something is undone that exceptions keep ending. Interrupts end it once or twice; an
# error of ours, or a failed device, ends it every time.
ATTEMPTS = 100


class StepOutcome:
    """Effect of a call of `Policy.forward_backward` on `.grad`. See `Policy.last_step`."""

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


class Transaction:
    """Changes of one call to model, gradients and thread: undone together if the call fails.

    It begins when it is made. `run` commits it where its work returns, which ends every change for
    the time of the call and keeps the gradients, and rolls it back where anything is raised.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` is that of the model."""
        self.changes: Changes = Changes()
        """Changes for the time of the call, undone at its end in any case."""
        self.guard: GradientGuard | None = None
        """Of the gradients; set before the first backward of a call that adds to them."""
        self.outcome: StepOutcome = StepOutcome()
        self.notes: bool = False
        """Whether exceptions get a note on what became of the gradients."""
        self._thread = ThreadState(device)
        self._handled = sys.exception()
        self._is_rolled_back = False

    def is_committed(self) -> bool:
        """Whether the call has succeeded; then nothing takes its gradients back."""
        return self.outcome.gradients == "added"

    def announce(self) -> StepOutcome:
        """The outcome, for the user; from here on exceptions get a note on it."""
        self.notes = True
        return self.outcome

    def run(self, work: Callable[["Transaction"], T]) -> T:
        """Call `work` with this transaction, by which it makes its changes; gives its result.

        If it raises, everything is rolled back first. An interrupt may end that as well, at any
        bytecode. Hence three levels that do the same: an interrupt ends one of them.
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
        """Undo everything unless the call has succeeded, and let `error` say which of the two.

        Exceptions that arrive meanwhile do not end this. One that is no `Exception`, such as
        KeyboardInterrupt, is raised at the end, in the place of `error`, which is its context.
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
        self._is_rolled_back = True

    def _take_back(self) -> None:
        if self.outcome.gradients == "pending":
            self.outcome.gradients = self.guard.take_back() if self.guard else "unchanged"
        self.guard = None

    def _note(self, error: BaseException) -> None:
        note = NOTES.get(self.outcome.gradients)
        if self.notes and note is not None and note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def retry_with_eager_blocks(host: Host, attempt: Callable[[Transaction], T]) -> T:
    """Call `attempt` with a transaction, and once more with eager blocks if the compiler fails.

    The first attempt has been rolled back before the second begins. If the second raises as well,
    its error is raised, and the next call compiles again. An attempt that lost gradients of earlier
    calls is not repeated; its error has a note that says so. Nor is one of several ranks, which
    would have to repeat it together: they hear of the failure before their next step.
    """
    compiling = host.compiling
    transaction = Transaction(host.device)
    try:
        return attempt(transaction)
    except Exception as error:
        if not compiling.give_up(error) or host.group is not None:
            raise
        if transaction.outcome.gradients == "cleared":
            _log.warning(WARNING, compiling.failure)
            raise
        # Its frames hold activations of the first attempt.
        traceback.clear_frames(error.__traceback__)
    try:
        result = attempt(Transaction(host.device))
    except BaseException:
        compiling.failure = None
        raise
    _log.warning(WARNING, compiling.failure)
    return result
