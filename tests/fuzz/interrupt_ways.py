"""An exception at a chosen moment of a call in the main thread.

An asynchronous exception (KeyboardInterrupt, one that a signal handler raises, one that another
thread sets) arrives between two bytecodes. CPython looks for one at the beginning of a function, at
a jump backwards and after a call. `Bytecodes` raises at any bytecode, which includes all of these.
"""

import dis
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType
from typing import Any

# Between these bytecodes, with which exceptions are handled, no exception can arrive; CPython loses
# count of references to the one that is handled where a trace function raises there.
_HANDLING = {dis.opmap[name] for name in ("PUSH_EXC_INFO", "COPY", "POP_EXCEPT")}
_LEAVING = {dis.opmap.get(name) for name in ("RETURN_VALUE", "RETURN_CONST", "RERAISE")}
Call = Callable[[], object]


class Interrupt(BaseException):
    """An exception that no `except Exception` catches, as KeyboardInterrupt."""


class Timeout(Exception):
    """An exception that `except Exception` catches, as signal handlers of time limits raise."""


@dataclass(eq=False)
class Attempt:
    """Outcome of a call that was to be interrupted."""

    error: BaseException | None
    """Exception that left the call; None where there was none."""
    raised: bool
    """Whether an exception was injected."""
    codes: tuple[CodeType, ...]
    """The functions that the exception passed through, outermost first."""
    leaving: bool = False
    """Whether it was raised in the place of a bytecode that leaves a function. CPython looks for
    exceptions before and after these, so no other way does that."""


def codes_of(traceback: TracebackType | None) -> Iterator[CodeType]:
    """The functions that an exception passed through, outermost first, but for this file's."""
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename != __file__:
            yield traceback.tb_frame.f_code
        traceback = traceback.tb_next


class Bytecodes:
    """Raises at bytecodes of functions that are wanted, counted from the beginning of the call."""

    def __init__(self, wanted: Callable[[CodeType], bool]) -> None:
        self._wanted = wanted
        self._known: dict[CodeType, bool] = {}
        self._moment = 0
        self._kind: type[BaseException] = Interrupt
        self._leaving = False
        self.seen = 0
        self.where: str = ""

    def count(self, call: Call) -> int:
        """How many bytecodes of wanted functions a call runs."""
        self._arm(0)
        try:
            call()
        finally:
            sys.settrace(None)
        return self.seen

    def interrupt(self, call: Call, moment: int, kind: type[BaseException]) -> Attempt:
        """Raise this exception at a bytecode, counted from 1."""
        error: BaseException | None = None
        self._kind = kind
        try:
            self._arm(moment)
            call()
        except BaseException as caught:
            error = caught
        finally:
            sys.settrace(None)
        codes = () if error is None else tuple(codes_of(error.__traceback__))
        return Attempt(error, self._moment == 0, codes, self._leaving)

    def _arm(self, moment: int) -> None:
        self._moment, self.seen, self._leaving = moment, 0, False
        # From Python 3.12 on no bytecode is traced unless some frame asked for it by now.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._entered)

    def _entered(self, frame: FrameType, event: str, arg: Any) -> Any:
        wanted = self._known.get(frame.f_code)
        if wanted is None:
            wanted = self._known[frame.f_code] = self._wanted(frame.f_code)
        if not wanted:
            return None
        frame.f_trace = self._stepped  # first, for Python 3.13
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] not in _HANDLING:
            self.seen += 1
            if self.seen == self._moment:
                self._moment = 0
                code = frame.f_code
                self.where = f"{code.co_filename}:{frame.f_lineno} {code.co_name} {frame.f_lasti}"
                self._leaving = code.co_code[frame.f_lasti] in _LEAVING
                raise self._kind("injected")
        return self._stepped
