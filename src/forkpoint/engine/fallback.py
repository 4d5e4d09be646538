"""A step whose compiler fails runs again, with eager blocks."""

import logging
import traceback
from collections.abc import Callable
from typing import TypeVar

from forkpoint.engine.compiling import WARNING
from forkpoint.engine.guard import Step
from forkpoint.engine.host import Host

T = TypeVar("T")
_log = logging.getLogger("forkpoint")


def run_or_fall_back(host: Host, work: Callable[[Step], T]) -> T:
    """Call `work` with a step, and once more with eager blocks where the compiler fails at it.

    The first attempt is put back before the second begins: gradients, model and the state of the
    thread. If the second raises as well, its error is raised, and the next step compiles again. A
    first attempt that lost gradients which had been accumulated before is not repeated; its error
    has a note that says so.
    """
    compiling = host.compiling
    step = Step(host.device)
    try:
        return step.run(lambda: work(step))
    except Exception as error:
        if not compiling.give_up(error):
            raise
        if step.outcome.gradients == "cleared":
            _log.warning(WARNING, compiling.failure)
            raise
        # Its frames hold activations of the first attempt.
        traceback.clear_frames(error.__traceback__)
    again = Step(host.device)

    def repeat() -> T:
        result = work(again)
        _log.warning(WARNING, compiling.failure)
        return result

    try:
        return again.run(repeat)
    except BaseException:
        compiling.failure = None
        raise
