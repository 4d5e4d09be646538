"""CPU time of work, relative to additions: machines differ, and cores may be busy."""

import time
from collections.abc import Callable


def cpu_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def ten_million_additions() -> None:
    total = 0
    for number in range(10_000_000):
        total += number


def relative_to_additions(work: Callable[[], object]) -> float:
    """CPU time in units of that of ten million additions: the best of three, timed in turn."""
    times = [(cpu_seconds(work), cpu_seconds(ten_million_additions)) for _ in range(3)]
    took, added = map(min, zip(*times, strict=True))
    return took / added
