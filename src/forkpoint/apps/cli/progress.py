"""Lines on stderr that say what a command is doing, where that is no terminal. No torch."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forkpoint.apps.cli.last_resort import say

EVERY_SECONDS: float = 5.0
"""Between two lines; what takes less writes none."""
LATER: float = 60.0
LATER_FACTOR: int = 6
"""After so many seconds lines are this many times as far apart: logs of hours stay short."""


@contextmanager
def lines(text: Callable[[float], str]) -> Iterator[None]:
    """Write `text(seconds since the start)` to stderr from time to time while the block runs.

    Each line ends with a line feed and has no control characters.
    """
    done, begin = threading.Event(), time.monotonic()

    def write() -> None:
        every = EVERY_SECONDS
        while not done.wait(every):
            seconds = time.monotonic() - begin
            say(text(seconds))
            every = EVERY_SECONDS * (LATER_FACTOR if seconds > LATER else 1)

    thread = threading.Thread(target=write, name="forkpoint progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def steps_line(what: str, done: int, total: int, seconds: float) -> str:
    """Such as "training: 3 of 40 steps, 12 s, about 2 min 28 s left"."""
    line = f"{what}: {done:,} of {total:,} steps, {duration(seconds)}"
    if 0 < done < total:
        line += f", about {duration(seconds / done * (total - done))} left"
    return line


def duration(seconds: float) -> str:
    """Seconds as people read them: 12 s, 2 min 5 s, 1 h 3 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
